"""Checkpoint names and search, the summary's parts, throughput settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv41.files import MARKER, begin_folder, publish_folder
from dsv41.inspect import PARTS, parameters_by_part, part_of
from lightning_modules.callbacks import LatestCheckpoint, TokenThroughput
from lightning_modules.callbacks.checkpoint import find_checkpoint, steps_in


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def folder(path: Path) -> Path:
    """A complete checkpoint of many ranks."""
    partial = begin_folder(path)
    (partial / "__0_0.distcp").write_text(path.name)
    publish_folder(partial, path, {})
    return path


def unfinished(path: Path) -> Path:
    """A folder without its marker."""
    (folder(path) / MARKER).unlink()
    return path


def nameless(path: Path, kind: str = "partial") -> Path:
    """A complete folder that a kill has kept from its name."""
    return folder(path).rename(path.with_name(f"{path.name}.{'0f' * 16}.{kind}"))


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


def test_steps_are_complete_folders_and_files(tmp_path: Path) -> None:
    complete = folder(tmp_path / "step-00000300.ckpt")
    file = touch(tmp_path / "step-00000100.ckpt")
    unfinished(tmp_path / "step-00000400.ckpt")
    cut = folder(tmp_path / "step-00000200.ckpt")
    (cut / "__0_0.distcp").write_text("")
    (tmp_path / "step-00000500.ckpt").mkdir()
    touch(tmp_path / f"step-00000600.ckpt.{'0f' * 16}.partial")
    nameless(tmp_path / "step-00000700.ckpt", "deleted")
    folder(tmp_path / "best.ckpt")
    assert steps_in(tmp_path) == [file, complete]


def test_last_and_best_may_be_folders_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    """Neither hides an older one: in the same run for the last, in an older run for the best."""
    old, new = (tmp_path / f"version_{run}" / "checkpoints" for run in (0, 1))
    best = folder(old / "best.ckpt")
    last = folder(new / "step-00000100.ckpt")
    folder(old / "step-00000900.ckpt")
    unfinished(new / "step-00000200.ckpt")
    unfinished(new / "best.ckpt")
    assert find_checkpoint(tmp_path, "last") == last
    assert find_checkpoint(tmp_path, "best") == best


def test_a_run_with_nothing_complete_is_passed_over(tmp_path: Path) -> None:
    last = folder(tmp_path / "version_0" / "checkpoints" / "step-00000100.ckpt")
    unfinished(tmp_path / "version_1" / "checkpoints" / "step-00000200.ckpt")
    assert find_checkpoint(tmp_path, "last") == last
    assert find_checkpoint(tmp_path, "best") is None


@pytest.mark.parametrize(("name", "file"), [("last", "step-00000200.ckpt"), ("best", "best.ckpt")])
def test_what_a_kill_has_kept_from_its_name_is_found_and_not_renamed(tmp_path: Path, name: str, file: str) -> None:
    """The run may be saving just then, and is about to rename it itself."""
    checkpoints = tmp_path / "version_3" / "checkpoints"
    folder(checkpoints / "step-00000100.ckpt")
    waiting = nameless(checkpoints / file)
    assert find_checkpoint(tmp_path, name) == waiting
    assert waiting.is_dir()
    assert not (checkpoints / file).exists()


def started(directory: Path, is_global_zero: bool) -> None:
    """A run whose checkpoints lie in `directory` begins."""
    callback = LatestCheckpoint()
    callback.dirpath = str(directory)
    trainer: Any = SimpleNamespace(is_global_zero=is_global_zero)
    module: Any = None
    callback.on_fit_start(trainer, module)


def test_a_run_clears_what_killed_saves_have_left_and_keeps_the_rest(tmp_path: Path) -> None:
    kept = [folder(tmp_path / "step-00000100.ckpt"), touch(tmp_path / "best.ckpt"), touch(tmp_path / "notes.partial")]
    unfinished(tmp_path / "step-00000200.ckpt").rename(tmp_path / f"step-00000200.ckpt.{'0f' * 16}.partial")
    touch(tmp_path / f"best.ckpt.{'0f' * 16}.partial")
    nameless(tmp_path / "step-00000050.ckpt", "deleted")
    nameless(tmp_path / "step-00000300.ckpt")
    started(tmp_path, is_global_zero=True)
    kept.append(tmp_path / "step-00000300.ckpt")
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert steps_in(tmp_path) == [kept[0], kept[3]]


def test_only_one_rank_clears(tmp_path: Path) -> None:
    left = touch(tmp_path / f"best.ckpt.{'0f' * 16}.partial")
    started(tmp_path, is_global_zero=False)
    assert left.exists()


def test_a_first_run_has_nothing_to_clear(tmp_path: Path) -> None:
    started(tmp_path / "not there yet", is_global_zero=True)
    assert list(tmp_path.iterdir()) == []


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
