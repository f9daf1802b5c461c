"""Tokens per second."""

from __future__ import annotations

from lightning.pytorch.callbacks import ThroughputMonitor


class TokenThroughput(ThroughputMonitor):
    """Lightning's ThroughputMonitor counting live tokens: ``train/device/items_per_sec`` is tokens per second.

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
            separator="/",
        )
