"""Ctrl-C, or a scheduler's SIGTERM, ends the run at the next optimizer step instead of throwing its work away."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulInterrupt(Callback):
    """The first Ctrl-C or SIGTERM, on any rank, finishes the current optimizer step, then the run ends as usual, with a
    checkpoint to resume from. A second one stops at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested = False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over both signals."""
        self.requested = False
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = {number: signal.signal(number, self._request) for number in SIGNALS}

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        rank_zero_info("interrupted: stopping after this optimizer step; press Ctrl-C again to stop at once")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop where nothing of a step is pending."""
        if trainer.fit_loop._should_accumulate():
            return
        # Ranks get the signal at different steps, or not all of them; they have to stop at the same one.
        if trainer.strategy.reduce_boolean_decision(self.requested, all=False):
            trainer.should_stop = True

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the signals back."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()
