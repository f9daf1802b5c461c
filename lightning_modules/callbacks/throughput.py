"""Tokens per second, and the share of the devices' arithmetic that the model's own FLOPs take."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor

from dsv41.cost import Flops, flops_per_sequence
from lightning_modules.strategy import EngramFSDPStrategy
from lightning_modules.task import DeepseekV41Task
from lightning_modules.training.lightning_private import compute_dtype_of_plugin, log_to_loggers, logs_this_step

SECONDS = 0.2  # that measuring a CPU may take


def measured_peak(dtype: torch.dtype) -> float:
    """FLOPs per second of this process's best matrix product, with the threads that it uses.

    Products of square matrices, growing while the time allows, each size up to three times. What else runs at the time
    counts: ranks that measure together find what each of them can have.

    Args:
        dtype: Of the product.
    """
    best, size, begin = 0.0, 256, time.perf_counter()
    torch.mm(*torch.ones(2, 64, 64, dtype=dtype))  # the first one starts the threads
    while True:
        pair = torch.ones(2, size, size, dtype=dtype)
        shortest = float("inf")
        for _ in range(3):
            before = time.perf_counter()
            torch.mm(*pair)
            now = time.perf_counter()
            shortest = min(shortest, now - before)
            if now - begin + shortest > SECONDS:
                break
        best = max(best, 2 * size**3 / shortest)
        if now - begin + 8 * shortest > SECONDS:
            return best
        size *= 2


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs per second that `device` can reach with matrix products in `dtype`, or None if nobody knows.

    For CUDA the vendor's number, from Lightning's table; for a CPU `measured_peak`, since none is published.
    """
    return measured_peak(dtype) if device.type == "cpu" else get_available_flops(device, dtype)


def compute_dtype(trainer: L.Trainer) -> torch.dtype:
    """What most matrix products of a run are made in."""
    strategy = trainer.strategy
    if isinstance(strategy, EngramFSDPStrategy) and strategy.options.mixed_precision == "bf16":
        return torch.bfloat16
    return compute_dtype_of_plugin(trainer)


def peak_of_all_devices(trainer: L.Trainer) -> float | None:
    """Sum of `device_peak` over ranks, the same on all; None if it is unknown on one of them."""
    device = trainer.strategy.root_device
    trainer.strategy.barrier("peak")  # on one machine, ranks measure at the same time
    peak = device_peak(device, compute_dtype(trainer))
    mine = torch.tensor([peak or 0.0, peak is None], dtype=torch.float64, device=device)
    total = trainer.strategy.reduce(mine, reduce_op="sum")
    assert isinstance(total, torch.Tensor)
    flops, unknown = total.tolist()
    return None if unknown else flops


def training_flops_per_token(trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
    """Mean over the positions of a sequence of the data's length; None without such a data module or model."""
    length = getattr(getattr(trainer, "datamodule", None), "sequence_length", None)
    if length is None or not isinstance(pl_module, DeepseekV41Task):
        return None
    return sum(flops_per_sequence(pl_module.built.config.text_config, length).values(), Flops()).training / length


class TokenThroughput(ThroughputMonitor):
    """Lightning's ThroughputMonitor counting live tokens, logged as ``train/tokens_per_sec``; and ``train/mfu``.

    The rate is over the last `window` batches and all devices, optimizer steps included, validation and logging
    excluded where Lightning excludes them.

    MFU, model FLOPs utilisation, is the rate times the FLOPs that a token costs in forward and backward (see
    `dsv41/cost.py`: recomputation does not count), as a share of what all devices can do. On CUDA that is the vendor's
    number for the dtype of the products. On a CPU, for which there is none, it is what the best of a few matrix
    products reaches at the start of the run, in 0.2 s: a measured peak, not a theoretical one. Nothing is logged where
    the peak is unknown.

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
        self.utilisation_per_token: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Find out what devices can do, before the clock runs."""
        flops = training_flops_per_token(trainer, pl_module)
        peak = None if flops is None else peak_of_all_devices(trainer)
        self.utilisation_per_token = None if flops is None or not peak else flops / peak
        super().on_train_start(trainer, pl_module)

    def _compute(self, trainer: L.Trainer, iter_num: int | None = None) -> None:
        # Lightning would log seven numbers a step, and call tokens "items".
        stage = trainer.state.stage
        if stage is None or stage != "train" or not logs_this_step(trainer):
            return
        metrics = self._throughputs[stage].compute()
        rate = metrics.get("items_per_sec", metrics.get("device/items_per_sec"))
        if rate is None:
            return
        found = {"train/tokens_per_sec": torch.tensor(rate)}
        if self.utilisation_per_token is not None:
            found["train/mfu"] = torch.tensor(rate * self.utilisation_per_token)
        log_to_loggers(trainer, found, step=iter_num)
