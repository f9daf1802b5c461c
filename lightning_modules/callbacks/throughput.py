"""Tokens per second."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ThroughputMonitor


class TokenThroughput(ThroughputMonitor):
    """Lightning's ThroughputMonitor counting live tokens, logged as ``train/tokens_per_sec`` alone.

    The rate is over the last `window` batches and all devices, optimizer steps included, validation and logging
    excluded where Lightning excludes them.

    Args:
        window: Batches in the rolling average, at least 2; nothing is reported before the window is full.
    """

    def __init__(self, window: int = 8) -> None:
        if window < 2:
            raise ValueError(f"window: must be at least 2 batches, got {window}")
        super().__init__(
            batch_size_fn=lambda batch: len(batch["input_ids"]),
            length_fn=lambda batch: int(batch["attention_mask"].sum()),
            window_size=window,
        )

    def _compute(self, trainer: L.Trainer, iter_num: int | None = None) -> None:
        # Lightning would log seven numbers a step, and call tokens "items".
        stage = trainer.state.stage
        if stage is None or stage != "train" or not trainer._logger_connector.should_update_logs:
            return
        metrics = self._throughputs[stage].compute()
        rate = metrics.get("items_per_sec", metrics.get("device/items_per_sec"))
        if rate is not None:
            trainer._logger_connector.log_metrics({"train/tokens_per_sec": torch.tensor(rate)}, step=iter_num)
