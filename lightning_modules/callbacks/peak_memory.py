"""The most memory that training has held so far."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_modules.training.lightning_private import logs_this_step

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> int:
    """Bytes: of CUDA tensors on `device`, or of this process's memory (resident set) where it computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        # Not getrusage, which on Linux counts what the process was before it started this program.
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PeakMemory(Callback):
    """Logs ``train/peak_memory_mb``, of rank 0, as often as the trainer logs. A resumed run begins to count anew."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Log, where the step is logged at all."""
        if logs_this_step(trainer):
            pl_module.log("train/peak_memory_mb", peak_memory(trainer.strategy.root_device) / 1e6)
