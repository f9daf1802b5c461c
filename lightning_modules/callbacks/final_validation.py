"""Validation after the last step of a run, where its interval would leave one out."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback

from lightning_modules.checkpoint.callbacks import ends_with_this_batch
from lightning_modules.training.lightning_private import validate_after_each_batch


class FinalValidation(Callback):
    """Makes a validation due after the last batch of a run, as if its interval ended there.

    Lightning itself then validates, once, also where a validation was due anyway; ``best.ckpt`` and the loss of the
    last step follow from it. Runs that validate never (no rows, ``trainer.limit_val_batches`` 0) still do not. The
    trainer's options are as before when the training has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Any] | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Set the intervals to one batch."""
        if self._before is None and ends_with_this_batch(trainer):
            self._before = validate_after_each_batch(trainer)

    def _restore(self, trainer: L.Trainer) -> None:
        for name, value in (self._before or {}).items():
            setattr(trainer, name, value)
        self._before = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the intervals."""
        self._restore(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restore the intervals."""
        self._restore(trainer)
