"""A training of two ranks in which one of them dies, for `test_failures.py`.

    python failing_run.py RANK:PLACE [options of dsv41 fit]       (Lightning starts the other rank)

runs it as a user would start it. PLACE is where it dies: see `PLACES`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import lightning.pytorch as L
import torch
import torch.distributed.checkpoint as dcp

from dsv41 import files
from lightning_modules.checkpoint import callbacks as checkpoint_callback
from lightning_modules.checkpoint import sharded as sharded_checkpoint
from lightning_modules.cli import get_cli

FATAL_STEP = 4  # saves are made after steps 2, 4 and 6


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def is_second_save(path: Any) -> bool:
    return f"step-{FATAL_STEP:08d}" in str(path)


def before(owner: Any, name: str) -> Callable[[], None]:
    """Die when `owner.name` is about to handle the second save."""
    original = getattr(owner, name)

    def install() -> None:
        def fatal(first: Any, *args: Any, **kwargs: Any) -> Any:
            if is_second_save(getattr(first, "path", first)):
                die()
            return original(first, *args, **kwargs)

        setattr(owner, name, fatal)

    return install


def before_deletion() -> None:
    """Die when the older checkpoint is about to go."""
    checkpoint_callback.discard = lambda path: die()  # type: ignore[assignment]


def in_step(fail: Callable[[], NoReturn]) -> Callable[[], None]:
    """Fail in the forward of the step after the first save."""

    def install() -> None:
        class Fatal(L.Callback):
            def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
                if trainer.global_step == FATAL_STEP - 1:
                    fail()

        callbacks.append(Fatal())

    return install


def complain() -> NoReturn:
    raise RuntimeError("this rank fails on purpose")


callbacks: list[L.Callback] = []
PLACES: dict[str, Callable[[], None]] = {
    "step": in_step(die),
    "error": in_step(complain),
    "data": before(dcp.FileSystemWriter, "write_data"),
    "metadata": before(dcp.FileSystemWriter, "finish"),
    "meta": before(sharded_checkpoint, "write_meta"),
    "naming": before(files, "_take_name"),
    "deletion": before_deletion,
}


def train(what: str, options: list[str]) -> None:
    """Fit in this rank; `what` is RANK:PLACE."""
    victim, place = what.split(":")
    if os.environ.get("LOCAL_RANK", "0") == victim:
        PLACES[place]()
    cli = get_cli(options, run=False)
    cli.trainer.callbacks += callbacks
    cli.trainer.fit(cli.model, cli.datamodule)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], sys.argv[2:])
