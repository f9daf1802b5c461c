"""End of a run by Ctrl-C, SIGTERM or SIGUSR1 (SLURM's warning) at the next optimizer step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_modules.checkpoint.callbacks import LatestCheckpoint
from lightning_modules.checkpoint.find import steps_in
from lightning_modules.training.lightning_private import inside_accumulation

# There is no SIGUSR1 on Windows.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class GracefulInterrupt(Callback):
    """The first Ctrl-C, SIGTERM or SIGUSR1, on any rank, finishes the current optimizer step, then the run ends as
    usual, with a checkpoint to resume from. A second one stops at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested = False
        self.stopped = False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the signals."""
        self.requested = self.stopped = False
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {number: signal.signal(number, self._request) for number in SIGNALS}

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        rank_zero_info(
            f"interrupted by {signal.Signals(number).name}: stopping after this optimizer step; press Ctrl-C again to "
            "stop at once"
        )

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop where nothing of a step is pending."""
        if inside_accumulation(trainer):
            return
        # Ranks get the signal at different steps, or not all of them; they have to stop at the same one.
        if trainer.strategy.reduce_boolean_decision(self.requested, all=False):
            self.stopped = trainer.should_stop = True

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        self._restore()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report where the checkpoint is."""
        latest = next((one for one in trainer.checkpoint_callbacks if isinstance(one, LatestCheckpoint)), None)
        if self.stopped and latest is not None and latest.dirpath and (steps := steps_in(Path(latest.dirpath))):
            rank_zero_info(f"interrupted: saved {steps[-1]}; the same command with --ckpt_path last resumes it")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()
