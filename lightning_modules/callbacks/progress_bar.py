"""Progress bar of a run that was resumed inside an epoch."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import TQDMProgressBar


class RunProgressBar(TQDMProgressBar):
    """TQDMProgressBar with a total after a resume inside an epoch.

    Lightning sets the total where an epoch begins, which such a run does not come by, and shows ``45/?``; and it has
    only the batches that remain.
    """

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Make the bar, with its total."""
        super().on_train_start(trainer)
        total = self.total_train_batches
        self.train_progress_bar.total = None if math.isinf(total) else total
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the epoch under way, up to the one in which ``max_steps`` is reached."""
        batches = self.trainer.num_training_batches
        left = self.trainer.max_steps - self.trainer.global_step
        if self.trainer.max_epochs != -1 or left < 0:
            return batches
        loop = self.trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.ready if loop.restarting else 0
        return min(batches, (done if done < batches else 0) + left * self.trainer.accumulate_grad_batches)
