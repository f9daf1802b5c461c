"""Predictions as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info


class PredictionFile(BasePredictionWriter):
    """Writes what ``predict_step`` returned for all rows to ``predictions.pt`` in the run's log directory.

    The file holds a dict of tensors, concatenated over batches; open it with ``torch.load(..., weights_only=True)``.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the file and print where it is."""
        path = Path(trainer.log_dir or ".") / "predictions.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: torch.cat([batch[name] for batch in predictions]) for name in predictions[0]}, path)
        rank_zero_info(f"predictions: {path}")
