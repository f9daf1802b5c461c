"""Checkpoint names and search, the summary's parts, throughput settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv41.inspect import PARTS, parameters_by_part, part_of
from lightning_modules.callbacks import LatestCheckpoint, TokenThroughput
from lightning_modules.callbacks.checkpoint import find_checkpoint, steps_in


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_last_is_the_newest_step_of_the_newest_run_that_has_one(tmp_path: Path) -> None:
    touch(tmp_path / "version_2" / "checkpoints" / "step-00000900.ckpt")
    touch(tmp_path / "version_10" / "checkpoints" / "step-00000020.ckpt")
    newest = touch(tmp_path / "version_10" / "checkpoints" / "step-00000100.ckpt")
    touch(tmp_path / "version_10" / "checkpoints" / ".step-00000200.ckpt.partial")
    touch(tmp_path / "version_11" / "events.out")
    touch(tmp_path / "version_old" / "checkpoints" / "step-99999999.ckpt")
    best = touch(tmp_path / "version_2" / "checkpoints" / "best.ckpt")
    assert find_checkpoint(tmp_path, "last") == newest
    assert find_checkpoint(tmp_path, "best") == best
    assert find_checkpoint(tmp_path / "nothing", "last") is None


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (5, 123456789, 40):
        touch(tmp_path / f"step-{step:08d}.ckpt")
    touch(tmp_path / "best.ckpt")
    assert [path.stem for path in steps_in(tmp_path)] == ["step-00000005", "step-00000040", "step-123456789"]


@pytest.mark.parametrize(("kwargs", "field"), [({"every_n_steps": 0}, "every_n_steps"), ({"keep": 0}, "keep")])
def test_checkpoint_settings_are_checked(kwargs: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        LatestCheckpoint(**kwargs)


def test_throughput_window_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^window:"):
        TokenThroughput(window=1)


def test_every_parameter_belongs_to_a_part(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    counts = parameters_by_part(model)
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert set(counts) == {part for part, _ in PARTS}
    assert counts["Engram tables"] == (408 + 484) * 16
    assert counts["head"] == counts["embedding"] == 512 * 64
    assert part_of("model.layers.1.attn.indexer.k_norm.weight") == "indexer"
    assert part_of("model.layers.1.attn.compressor.norm.weight") == "attention"
    assert part_of("something.else") == "other"
