"""Predictions as a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info

from dsv41.files import written_whole
from lightning_modules.checkpoint.find import run_of
from lightning_modules.checkpoint.run_directory import run_directory
from lightning_modules.data.rows import NO_ROW


class PredictionFile(BasePredictionWriter):
    """Writes what ``predict_step`` returned for all rows to ``predictions-best.pt`` in the directory of the run whose
    checkpoint ``best.ckpt`` was loaded; without a checkpoint to ``predictions.pt`` in the
    trainer's own directory (`run_directory`). An older file is kept: the new one gets a number.

    The file holds a dict of tensors, all rows in their order, whatever the number of ranks; open it with
    ``torch.load(..., weights_only=True)``.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the file and print where it is."""
        directory = run_directory(trainer)  # asked for by all ranks
        whole = {
            name: torch.cat([_of_all_ranks(trainer, batch[name]) for batch in predictions]) for name in predictions[0]
        }
        real = whole["row_id"] != NO_ROW
        if trainer.is_global_zero:
            path = _free_name(trainer, directory)
            with written_whole(path) as partial, partial.open("wb") as file:
                torch.save({name: part[real] for name, part in whole.items()}, file)
            rank_zero_info(f"predictions: {path}")


def _free_name(trainer: L.Trainer, directory: Path) -> Path:
    if trainer.ckpt_path is None:
        folder, name = directory, "predictions"
    else:
        checkpoint = Path(trainer.ckpt_path)
        folder, name = run_of(checkpoint), f"predictions-{checkpoint.stem}"
    path = folder / f"{name}.pt"
    for number in count(1):
        if not path.exists():
            break
        path = folder / f"{name}-{number}.pt"
    return path


def _of_all_ranks(trainer: L.Trainer, rows: torch.Tensor) -> torch.Tensor:
    """A batch's rows in their order, from the parts [B, ...] of the ranks: rank r has every W-th from the r-th."""
    if trainer.world_size == 1:
        return rows
    parts = trainer.strategy.all_gather(rows.to(trainer.strategy.root_device))
    return parts.cpu().transpose(0, 1).flatten(0, 1)
