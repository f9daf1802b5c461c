"""What a model without context would reach on the validation text, to compare the curve with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only


class UnigramBaseline(Callback):
    """Prints the data's sizes and unigram entropy at the start, and the last validation loss beside it at the end.

    The entropy is logged as ``val/unigram_entropy`` (nats per token), a flat line beside ``val/loss``. Data modules
    without `unigram_entropy` are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entropy: float | None = None

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Describe the data."""
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(data, "unigram_entropy"):
            return
        rank_zero_info(f"data: {data.describe()}")
        if trainer.enable_validation:
            self.entropy = data.unigram_entropy("val")
            rank_zero_info(f"unigram entropy of the validation text: {self.entropy:.4f} nats per token")

    @rank_zero_only
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the flat line at the same steps as the validation loss."""
        if self.entropy is not None and not trainer.sanity_checking:
            for logger in trainer.loggers:
                logger.log_metrics({"val/unigram_entropy": self.entropy}, step=trainer.global_step)

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print both numbers."""
        loss = trainer.callback_metrics.get("val/loss")
        if self.entropy is not None and loss is not None:
            rank_zero_info(
                f"validation loss {float(loss):.4f}, unigram entropy {self.entropy:.4f} nats per token "
                f"after {trainer.global_step} steps"
            )
