"""Clock, signals, step numbers and bar of runs that are stopped, resumed and extended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.callbacks import RunProgressBar, RunTimer
from lightning_modules.checkpoint.find import find_checkpoint
from lightning_modules.cli import DeepseekV41CLI, main


def curve(run: Path, tag: str = "train/loss") -> dict[int, float]:
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0})
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars(tag)]
    assert len(found) == len(dict(found)), "no step has two points"
    return dict(found)


def test_the_clock_starts_with_each_run(nano_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches a step, ten seconds each, on a clock of their own: every job of 30 s makes two steps."""
    now = [0.0]
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=lambda: now[0]))
    step = RunTimer.on_train_batch_end

    def later(self: RunTimer, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        now[0] += 10
        step(self, trainer, *args, **kwargs)

    monkeypatch.setattr(RunTimer, "on_train_batch_end", later)
    options = [
        "--trainer.max_time",
        "00:00:00:30",
        "--trainer.max_steps",
        "9",
        "--trainer.accumulate_grad_batches",
        "2",
    ]
    for job, last in enumerate(("step-00000002", "step-00000004", "step-00000006")):
        main(["fit", *nano_args, *options, *(["--ckpt_path", "last"] if job else [])])
        found = find_checkpoint(tmp_path / "runs" / "nano", "last")
        assert found is not None
        assert found.stem == last
        progress = torch.load(found, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        assert progress["total"]["completed"] % 2 == 0
    assert list(curve(tmp_path / "runs" / "nano" / "version_0")) == list(range(6))


def test_a_timer_takes_what_max_time_takes(nano_cli: Callable[..., DeepseekV41CLI]) -> None:
    cli = nano_cli("--trainer.max_time", "00:00:01:00")
    (timer,) = [one for one in cli.trainer.callbacks if isinstance(one, L.callbacks.Timer)]  # type: ignore[attr-defined]
    assert isinstance(timer, RunTimer)
    assert timer.time_remaining() == timedelta(minutes=1).total_seconds()


class Raise(L.Callback):
    """A signal in the first half of an accumulation."""

    def __init__(self, number: int, at_batch: int) -> None:
        self.number, self.at_batch = number, at_batch

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.at_batch:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("slurm", [False, True])
def test_sigusr1_saves_between_steps_and_reports_where(
    slurm: bool,
    nano_cli: Callable[..., DeepseekV41CLI],
    nano_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    if slurm:
        for name in ("NTASKS", "NTASKS_PER_NODE", "JOB_ID"):
            monkeypatch.setenv(f"SLURM_{name}", "1")
        for name in ("PROCID", "LOCALID", "NODEID"):
            monkeypatch.setenv(f"SLURM_{name}", "0")
        monkeypatch.setenv("SLURM_JOB_NAME", "train")
    options = ["--trainer.max_steps", "5", "--trainer.accumulate_grad_batches", "2", "--checkpoint.every_n_steps", "40"]
    cli = nano_cli(*options)
    before = signal.getsignal(signal.SIGUSR1)
    cli.trainer.callbacks.insert(0, Raise(signal.SIGUSR1, at_batch=4))  # type: ignore[attr-defined]
    with caplog.at_level("INFO"):
        cli.trainer.fit(cli.model, cli.datamodule)
    assert signal.getsignal(signal.SIGUSR1) is before
    path = tmp_path / "runs" / "nano" / "version_0" / "checkpoints" / "step-00000003.ckpt"
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("interrupted by SIGUSR1: stopping after this optimizer step") for line in said)
    assert f"interrupted: saved {path}; the same command with --ckpt_path last resumes it" in said
    assert {found.name for found in tmp_path.iterdir()} == {"nano.yaml", "runs"}
    main(["fit", *nano_args, *options, "--ckpt_path", "last"])
    main(["fit", *nano_args, *options])
    resumed, unbroken = (curve(tmp_path / "runs" / "nano" / f"version_{n}") for n in (0, 1))
    assert list(resumed) == list(range(5))
    assert resumed == unbroken
    tokens = [curve(tmp_path / "runs" / "nano" / f"version_{n}", "train/tokens") for n in (0, 1)]
    assert tokens[0] == tokens[1]


class StopAfterValidation(L.Callback):
    """Early stopping, at the second validation."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.global_step == 4


@pytest.mark.parametrize("end", ["max_steps", "early stopping"])
def test_an_extended_run_has_the_curves_of_a_longer_one(
    end: str, nano_cli: Callable[..., DeepseekV41CLI], nano_args: list[str], tmp_path: Path
) -> None:
    options = ["--checkpoint.every_n_steps", "40", "--model.schedule.name", "constant"]
    cli = nano_cli(*options, "--trainer.max_steps", "4" if end == "max_steps" else "7")
    if end != "max_steps":
        cli.trainer.callbacks.insert(0, StopAfterValidation())  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    main(["fit", *nano_args, *options, "--trainer.max_steps", "7", "--ckpt_path", "last"])
    main(["fit", *nano_args, *options, "--trainer.max_steps", "7"])
    runs = tmp_path / "runs" / "nano"
    for tag in ("train/loss", "train/lr/decay", "within/update_ratio/total", "val/loss"):
        assert curve(runs / "version_0", tag) == curve(runs / "version_1", tag), tag


@pytest.mark.parametrize(
    ("changes", "total"),
    [({}, 30), ({"accumulate": 2}, 40), ({"batches": 25}, 25), ({"restarting": False}, 10), ({"max_epochs": 3}, 100)],
)
def test_the_bar_counts_what_was_done_before_the_resume(changes: dict[str, Any], total: int) -> None:
    """Twenty batches of an epoch are done, and ten optimizer steps are left."""
    loop = SimpleNamespace(
        restarting=changes.get("restarting", True),
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=SimpleNamespace(ready=20))),
    )
    bar = RunProgressBar()
    bar._trainer = SimpleNamespace(  # type: ignore[assignment]
        num_training_batches=changes.get("batches", 100),
        max_steps=30,
        global_step=20,
        max_epochs=changes.get("max_epochs", -1),
        accumulate_grad_batches=changes.get("accumulate", 1),
        fit_loop=loop,
    )
    assert bar.total_train_batches == total


def test_the_bar_of_a_resumed_run_has_a_total(nano_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = [*nano_args, "--data.batch_size", "1"]
    main(["fit", *args, "--trainer.max_steps", "2"])
    capsys.readouterr()
    main(["fit", *args, "--trainer.max_steps", "5", "--ckpt_path", "last", "--trainer.enable_progress_bar", "true"])
    captured = capsys.readouterr()
    assert "5/5" in captured.out + captured.err
    assert "5/?" not in captured.out + captured.err
