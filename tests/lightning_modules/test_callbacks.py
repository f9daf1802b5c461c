"""Checkpoint names and search, the summary's parts, throughput and utilisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsv41.cost import PARTS, Flops, flops_per_sequence, parameters_by_part, part_of
from dsv41.files import MARKER, begin_folder, publish_folder
from lightning_modules.callbacks import LatestCheckpoint, TokenThroughput, throughput
from lightning_modules.checkpoint.find import find_checkpoint, steps_in
from lightning_modules.cli import DeepseekV41CLI


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


def rates_of(cli: DeepseekV41CLI, data: Any, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Fit with a throughput callback whose window is short; its curves."""
    kept = [callback for callback in cli.trainer.callbacks if not isinstance(callback, TokenThroughput)]  # type: ignore[attr-defined]
    cli.trainer.callbacks = [TokenThroughput(window=2), *kept]  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, data)
    events = EventAccumulator(str(folder / "runs" / "nano" / "version_0"))
    events.Reload()
    wanted = {"train/tokens_per_sec", "train/mfu"} & set(events.Tags()["scalars"])
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in wanted}


def test_utilisation_is_the_rate_times_what_a_token_costs_over_the_peak(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "device_peak", lambda device, dtype: 3e9)
    cli = nano_cli("--trainer.limit_val_batches", "0")
    found = rates_of(cli, cli.datamodule, tmp_path)
    costs = flops_per_sequence(cli.model.built.config.text_config, cli.datamodule.sequence_length)
    per_token = sum(costs.values(), Flops()).training / cli.datamodule.sequence_length
    assert [step for step, _ in found["train/mfu"]] == [step for step, _ in found["train/tokens_per_sec"]] == [1, 2, 3]
    expected = [rate * per_token / 3e9 for _, rate in found["train/tokens_per_sec"]]
    assert [value for _, value in found["train/mfu"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("missing", ["peak", "sequence length"])
def test_no_utilisation_is_logged_where_it_is_unknown(
    nano_cli: Callable[..., DeepseekV41CLI], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(throughput, "device_peak", lambda device, dtype: None if missing == "peak" else 3e9)
    cli = nano_cli("--trainer.limit_val_batches", "0")
    cli.datamodule.setup("fit")
    data = cli.datamodule if missing == "peak" else torch.utils.data.DataLoader(cli.datamodule.dataset("train"), 2)
    assert set(rates_of(cli, data, tmp_path)) == {"train/tokens_per_sec"}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (("--trainer.precision", "32-true"), torch.float32),
        (("--trainer.precision", "64-true"), torch.float64),
        (("--trainer.precision", "bf16-mixed"), torch.bfloat16),
        (("--trainer.strategy", "engram_fsdp"), torch.float32),
        (
            ("--trainer.strategy", "EngramFSDPStrategy", "--trainer.strategy.mixed_precision", "bf16"),
            torch.bfloat16,
        ),
    ],
)
def test_the_peak_is_that_of_the_dtype_of_products(
    nano_cli: Callable[..., DeepseekV41CLI],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    asked = []
    monkeypatch.setattr(throughput, "device_peak", lambda device, dtype: asked.append((device.type, dtype)))
    trainer = nano_cli(*options).trainer
    assert throughput.peak_of_all_devices(trainer) is None
    assert asked == [("cpu", dtype)]


def test_the_peak_of_a_gpu_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "get_available_flops", lambda device, dtype: (device.type, dtype))
    assert throughput.device_peak(torch.device("cuda", 1), torch.bfloat16) == ("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("speed", "sizes"), [(1e11, [256] * 3 + [512] * 3 + [1024] * 3), (2e9, [256] * 3 + [512]), (1e7, [256])]
)
def test_the_peak_of_a_cpu_is_that_of_its_best_product(
    monkeypatch: pytest.MonkeyPatch, speed: float, sizes: list[int]
) -> None:
    """On a clock that products alone move on; the slowest of each size takes twice as long. It ends in time."""
    now, taken = [0.0], list[int]()

    def product(a: torch.Tensor, b: torch.Tensor) -> None:
        if len(a) >= 256:  # the others start the threads
            first = len(a) not in taken
            taken.append(len(a))
            now[0] += 2 * len(a) ** 3 / speed * (2 if first and speed == 1e11 else 1)

    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(throughput.torch, "mm", product)
    assert throughput.device_peak(torch.device("cpu"), torch.float32) == pytest.approx(speed)
    assert taken == sizes
    assert now[0] < 0.3 or sizes == [256]


def test_a_real_peak_is_measured() -> None:
    assert 1e6 < throughput.measured_peak(torch.float32) < 1e15


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
