"""Summary of the model's parts, printed once before training."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from dsv41.cost import parameters_by_part


class PartSummary(Callback):
    """Parameters by part of the architecture, where Lightning's summary would show one line for the whole model."""

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        counts = parameters_by_part(pl_module)
        total = sum(counts.values())
        lines = [f"  {part:<16}{count:>16,}{count / total:>8.1%}" for part, count in counts.items()]
        rank_zero_info("\n".join([f"parameters:{'':<7}{total:>16,}", *lines]))
