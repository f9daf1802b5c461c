"""``dsv41 compare`` among directories of which some are no runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from lightning_modules.ablation.comparing import compare, records_of
from lightning_modules.ablation.curves import NoLossError


def run(directory: Path, loss: float | None, seed: int = 0, events: str = ".") -> Path:
    """A run with its configuration, and a validation loss if it came so far."""
    writer = SummaryWriter(str(directory / events))
    if loss is not None:
        for step in (1, 3):
            writer.add_scalar("val/loss", loss + 1 / step, step)
    writer.close()
    (directory / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed}))
    return directory


def test_directories_without_a_loss_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "exp" / "version_0", 2.0)
    empty = run(tmp_path / "exp" / "version_1", None, seed=1)
    run(tmp_path / "exp" / "version_2", 3.0, seed=2)
    records = records_of([str(tmp_path / "exp")])
    assert [(record.seed, record.variant) for record in records] == [(0, "exp"), (2, "exp")]
    assert capsys.readouterr().err == f"left out: {empty}: has no val/loss, so there is nothing to compare\n"
    assert "| exp | 2 |" in re.sub(" +", " ", compare([str(tmp_path / "exp")]))


def test_one_that_was_asked_for_by_name_is_an_error(tmp_path: Path) -> None:
    empty = run(tmp_path / "exp" / "version_0", None)
    for path in (empty, tmp_path / "exp"):
        with pytest.raises(NoLossError, match=f"^{empty}: has no val/loss"):
            records_of([str(path)])


def test_a_sub_dir_of_the_logger_belongs_to_the_run_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "exp" / "version_0", 2.0, seed=5, events="curves")
    monkeypatch.setenv("HERE", str(tmp_path))
    (record,) = records_of(["$HERE/exp"])
    assert (record.variant, record.seed, record.loss) == ("exp", 5, pytest.approx(2 + 1 / 3))
