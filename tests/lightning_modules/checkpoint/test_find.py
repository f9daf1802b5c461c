"""What "last" and "best" pass over is said, and nothing older is taken unasked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jsonargparse import Namespace

from dsv41.files import MARKER, begin_folder, publish_folder
from lightning_modules.checkpoint import run_directory
from lightning_modules.checkpoint.find import find_checkpoint, runs_in, search
from lightning_modules.cli import main

HEX = "0f" * 16


def folder(path: Path) -> Path:
    """A complete checkpoint of many ranks, as far as names and files go."""
    partial = begin_folder(path)
    (partial / "__0_0.distcp").write_text("tensors")
    publish_folder(partial, path, {})
    return path


def resolve(runs: Path, name: str, subcommand: str = "fit") -> Path:
    """What the command line makes of ``--ckpt_path last``."""
    init = Namespace(save_dir=str(runs.parent), name=runs.name)
    logger = Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=init)
    return run_directory.resolve(Namespace(logger=logger), name, resume=subcommand == "fit")


def passed_over(runs: Path, name: str) -> list[Path]:
    """What the search has seen and not taken."""
    return list(search(runs_in(runs), name).skipped)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs, of which the newer has nothing complete."""
    runs = tmp_path / "runs"
    old, new = (runs / f"version_{run}" / "checkpoints" for run in (0, 1))
    folder(old / "step-00000100.ckpt")
    folder(old / "best.ckpt")
    folder(old / f"step-00000100.ckpt.{HEX}.deleted")
    (folder(old / "step-00000200.ckpt") / MARKER).unlink()
    (old / f"step-00000300.ckpt.{HEX}.partial").touch()
    (old / f"best.ckpt.{HEX}.partial").touch()
    new.mkdir(parents=True)
    (new / f"step-00000900.ckpt.{HEX}.partial").touch()
    folder(runs / "version_0" / "notes")
    return runs


PASSED_OVER = [
    f"version_1/checkpoints/step-00000900.ckpt.{HEX}.partial",
    f"version_0/checkpoints/step-00000100.ckpt.{HEX}.deleted",
    "version_0/checkpoints/step-00000200.ckpt",
    f"version_0/checkpoints/step-00000300.ckpt.{HEX}.partial",
]


def test_what_is_passed_over_comes_from_the_newest_run_down_to_the_chosen_one(runs: Path) -> None:
    assert [str(path.relative_to(runs)) for path in passed_over(runs, "last")] == PASSED_OVER
    assert passed_over(runs, "best") == [runs / "version_0" / "checkpoints" / f"best.ckpt.{HEX}.partial"]
    folder(runs / "version_1" / "checkpoints" / "step-00000800.ckpt")
    assert [str(path.relative_to(runs)) for path in passed_over(runs, "last")] == PASSED_OVER[:1]


@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_each_is_named_once_before_training_goes_on(
    runs: Path, subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / "version_0" / "checkpoints" / "step-00000100.ckpt"
    assert resolve(runs, "last", subcommand) == path
    skipped, chosen = capsys.readouterr().err.splitlines()
    assert skipped == (
        f"ckpt_path: not complete, or left by a killed save or deletion, and skipped: {', '.join(PASSED_OVER)}"
    )
    assert chosen == f"ckpt_path: last is {path}"


def test_nothing_is_said_where_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path / "runs" / "version_0" / "checkpoints" / "step-00000100.ckpt")
    resolve(tmp_path / "runs", "last")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_where_nothing_is_complete_the_rest_is_named_all_the_same(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(runs / "version_0" / "checkpoints" / "step-00000100.ckpt")
    with pytest.raises(FileNotFoundError, match="no 'last' checkpoint under"):
        resolve(runs, "last")
    assert "step-00000200.ckpt" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_ends_the_command_and_the_choice_is_the_users(
    nano_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *nano_args, "--trainer.max_steps", "2"])
    runs = tmp_path / "runs" / "nano"
    newest = find_checkpoint(runs, "last")
    assert newest is not None
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    left = newest.with_name(f"step-00000003.ckpt.{HEX}.partial")
    left.touch()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["fit", *nano_args, "--ckpt_path", "last"])
    error = capsys.readouterr().err
    assert error.count(left.name) == 1
    assert f"dsv41: error: ckpt_path: {newest}: its content is not what was written" in error
    assert "complete beside it: best.ckpt" in error
    assert newest.read_bytes() == content
