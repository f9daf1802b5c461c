"""Unigram baseline: the loss of a model without context on the validation text, to compare the curve with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_modules.insight.drawing import show_constant


class UnigramBaseline(Callback):
    """Prints the data's sizes and unigram entropy at the start; `RunReport` has it beside the last validation loss.

    The entropy, in nats per token, is a result ``val/unigram_entropy`` of every validation. As it stays the same in a
    run, it is no curve but the text ``within/constants/unigram_entropy`` in TensorBoard. Data modules without
    `unigram_entropy` and runs without validation rows are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entropy: float | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Describe the data."""
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(data, "unigram_entropy"):
            return
        rank_zero_info(f"data: {data.describe()}")
        if len(data.dataset("val")):
            self.entropy = data.unigram_entropy("val")
            rank_zero_info(
                f"unigram entropy of the validation text: {self.entropy:.4f} nats per token, "
                f"{data.unigram_bits_per_byte('val'):.4f} bits per byte"
            )
            show_constant(trainer, "unigram_entropy", f"{self.entropy:.4f} nats per token")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the entropy beside the validation loss."""
        if self.entropy is not None:
            # Equal on all ranks.
            pl_module.log("val/unigram_entropy", self.entropy, sync_dist=True, reduce_fx="max", logger=False)
