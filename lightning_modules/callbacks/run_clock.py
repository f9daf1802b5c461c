"""Clock of ``trainer.max_time``, and step numbers of a resumed run's curves."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback, Timer

from lightning_modules.training.lightning_private import align_logged_step, inside_accumulation


class RunTimer(Timer):
    """Timer that starts with each run, and ends it between optimizer steps.

    Lightning's own adds up the time of all runs that a checkpoint has gone through: the second job of a chain with the
    same ``max_time`` would make no step. It also stops inside a gradient accumulation, which no checkpoint can hold.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Leave the clock at zero."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop the run if its time is over and no optimizer step is under way."""
        if not inside_accumulation(trainer):
            super().on_train_batch_end(trainer, *args, **kwargs)


class StepLabels(Callback):
    """Numbers the points of all curves by optimizer steps done, also after a resume; has to be the first callback."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Set the number, before other callbacks log."""
        align_logged_step(trainer)
