"""A checkpoint file is the old one or the new one, never part of one."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.files import begin_folder, is_complete, publish_folder
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO


def folder(path: Path) -> Path:
    """A complete checkpoint of many ranks, as far as names and files go."""
    partial = begin_folder(path)
    (partial / "__0_0.distcp").write_text("tensors")
    publish_folder(partial, path, {})
    return path


def test_the_file_holds_what_was_saved_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": torch.arange(3)}, target)
    assert [path.name for path in target.parent.iterdir()] == ["a.ckpt"]
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(target)["x"], torch.arange(3))


def test_a_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, target)

    def half(_checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, target)
    monkeypatch.undo()
    assert AtomicCheckpointIO().load_checkpoint(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_final_name_appears_only_when_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.ckpt"
    real_save = torch.save

    def watched(checkpoint: Any, file: Any) -> None:
        real_save(checkpoint, file)
        assert not target.exists()

    monkeypatch.setattr(torch, "save", watched)
    AtomicCheckpointIO().save_checkpoint({"step": 1}, target)
    assert target.exists()


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})


def test_a_file_replaces_a_folder_of_the_same_name(tmp_path: Path) -> None:
    target = folder(tmp_path / "a.ckpt")
    AtomicCheckpointIO().save_checkpoint({"step": 2}, target)
    assert AtomicCheckpointIO().load_checkpoint(target) == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("broken", ["save", "fsync", "rename"])
def test_a_failed_save_leaves_the_older_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Whichever step fails, the older checkpoint may be the only one there is."""
    target = folder(tmp_path / "a.ckpt")

    def fail(*_arguments: Any, **_keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch if broken == "save" else os, broken, fail)
        with pytest.raises(OSError, match="No space left"):
            AtomicCheckpointIO().save_checkpoint({"step": 2}, target)
    assert (target / "__0_0.distcp").read_text() == "tensors"
    assert is_complete(target)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_files_and_folders_are_removed(tmp_path: Path) -> None:
    kept = folder(tmp_path / "kept.ckpt")
    AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "file.ckpt")
    folder(tmp_path / "folder.ckpt")
    for name in ("file.ckpt", "folder.ckpt", "neither.ckpt"):
        AtomicCheckpointIO().remove_checkpoint(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.ckpt"]
    assert is_complete(kept)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size`, as if the disk were full (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 3000, 100_000, 399_900, 400_500])
def test_a_disk_that_is_full_at_any_place_leaves_the_older_file_alone(tmp_path: Path, size: int) -> None:
    """torch's writer turns what the disk says into a RuntimeError or not, depending on the place."""
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, target)
    message = r"a\.ckpt could not be written: File too large \(about 0\.4 MB were needed, .* MB are free there\); what"
    with largest_file(size), pytest.raises(OSError, match=message):
        AtomicCheckpointIO().save_checkpoint({"step": 2, "state_dict": {"x": torch.zeros(100_000)}}, target)
    assert AtomicCheckpointIO().load_checkpoint(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_error_that_is_no_matter_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, RuntimeError, TypeError), match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"step": lambda: 1}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_states_of_optimizers_can_stay_on_the_disk(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"x": torch.arange(3)}, "optimizer_states": [{"state": {}, "param_groups": []}]}
    AtomicCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt").keys() == checkpoint.keys()
    without = AtomicCheckpointIO(optimizers=False).load_checkpoint(tmp_path / "a.ckpt")
    assert without.keys() == {"state_dict"}
    assert torch.equal(without["state_dict"]["x"], torch.arange(3))
