"""No step is missing from the curves, or there twice, wherever a kill falls around the checkpoint of the step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from ranks import fork
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.cli import DeepseekV41CLI, main

STEPS = 4
KILLED = 9
OPTIONS = ("--trainer.max_steps", str(STEPS), "--checkpoint.every_n_steps", "1")


def ended(function: Callable[..., Any], **arguments: Any) -> int:
    """Exit status of a function in a process that is forked from a clean one."""
    (outcome,) = fork(function, None, **arguments)
    return outcome.exit_code


def fit(words: list[str]) -> None:
    main(["fit", *words])


def fit_until(step: int, when: str, words: list[str]) -> None:
    """Train, and end at once before or after the checkpoint of `step` gets its name."""
    save = ModelCheckpoint._save_checkpoint

    def fatal(callback: ModelCheckpoint, trainer: L.Trainer, filepath: str) -> None:
        its = filepath.endswith(f"step-{step:08d}.ckpt")
        if its and when == "before":
            os._exit(KILLED)
        save(callback, trainer, filepath)
        if its:
            os._exit(KILLED)

    ModelCheckpoint._save_checkpoint = fatal  # type: ignore[method-assign]
    fit(words)


def curves(run: Path) -> dict[str, list[int]]:
    """Steps of every scalar that a reader of the event files sees, in their order."""
    events = EventAccumulator(str(run))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(
    ("when", "kills", "accumulation"), [("after", (1, 2), 1), ("after", (1, 3), 2), ("before", (2, 3), 1)]
)
def test_every_step_is_in_every_curve_once(
    when: str, kills: tuple[int, ...], accumulation: int, nano_args: list[str], tmp_path: Path
) -> None:
    """Step 2 is followed by a validation, with accumulation every step is; the others are not."""
    options = [*nano_args, *OPTIONS, "--trainer.accumulate_grad_batches", str(accumulation)]
    resumed: tuple[str, ...] = ()
    for step in kills:
        assert ended(fit_until, step=step, when=when, words=[*options, *resumed]) == KILLED
        resumed = ("--ckpt_path", "last")
    assert ended(fit, words=[*options, *resumed]) == 0
    found = curves(tmp_path / "runs" / "nano" / "version_0")
    validated = list(range(STEPS)) if accumulation == 2 else [1, 3]
    assert {"train/loss", "val/loss"} <= found.keys()
    for tag, steps in found.items():
        if tag == "epoch" or tag.startswith(("train/tokens_per_sec", "train/mfu")):
            continue  # beside each of several groups of numbers; rates over the batches since the process began
        if tag.startswith("train/lr/"):  # logged before every batch
            assert steps == sorted(accumulation * list(range(STEPS))), tag
        else:
            assert steps in (list(range(STEPS)), validated), tag
    assert found["train/loss"] == list(range(STEPS))
    assert found["val/loss"] == validated


class Points(Logger):
    """Keeps how often each number was logged at each step."""

    name = version = "points"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.points: Counter[tuple[str, int | None]] = Counter()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.update((name, step) for name in metrics if name.startswith(("train/", "val/", "late")))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def points(cli: DeepseekV41CLI) -> Counter[tuple[str, int | None]]:
    """How often each number of training and validation is logged at each step."""
    logger = Points()
    cli.trainer.loggers = [logger]
    cli.trainer.fit(cli.model, cli.datamodule)
    return logger.points


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_checkpoints_change_nothing_in_what_loggers_get(
    nano_cli: Callable[..., DeepseekV41CLI], interval: int, tmp_path: Path
) -> None:
    often, never = (
        points(
            nano_cli(
                *("--trainer.log_every_n_steps", str(interval), "--checkpoint.every_n_steps", every),
                *("--trainer.default_root_dir", str(tmp_path / every)),
            )
        )
        for every in ("1", "1000")
    )
    assert often == never
    assert set(often.values()) == {1}
    assert {step for name, step in often if name == "train/loss"} == set(range(interval - 1, STEPS, interval))


def test_what_a_task_logs_at_the_end_of_a_batch_arrives_once(
    nano_cli: Callable[..., DeepseekV41CLI], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its hook comes after those of the callbacks, and so after the checkpoint."""
    cli = nano_cli("--checkpoint.every_n_steps", "1", "--trainer.default_root_dir", str(tmp_path))
    monkeypatch.setattr(
        type(cli.model), "on_train_batch_end", lambda task, *_: task.log("late", float(task.trainer.global_step))
    )
    found = points(cli)
    assert {key: count for key, count in found.items() if key[0] == "late"} == {("late", s): 1 for s in range(STEPS)}
    assert set(found.values()) == {1}


def test_a_run_that_failed_after_its_checkpoint_hides_no_step_of_the_next(
    nano_cli: Callable[..., DeepseekV41CLI], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cli = nano_cli("--checkpoint.every_n_steps", "1", "--trainer.default_root_dir", str(tmp_path))

    def fail(*_: Any) -> None:
        raise RuntimeError("at the end of the first batch")

    with monkeypatch.context() as patch:
        patch.setattr(type(cli.model), "on_train_batch_end", fail)
        with pytest.raises(RuntimeError, match="first batch"):
            cli.trainer.fit(cli.model, cli.datamodule)
    assert sum(count for (name, _), count in points(cli).items() if name == "train/loss") == STEPS - 1
