"""Any torch optimizer and schedule for a user's task that leaves `configure_optimizers` alone."""

from __future__ import annotations

from types import MethodType
from typing import Any

import lightning.pytorch as L
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LRSchedulerTypeTuple, ReduceLROnPlateau, instantiate_class
from torch.optim import Optimizer


def add_optimizer_options(parser: LightningArgumentParser, task: Any, base: type[L.LightningModule]) -> None:
    """Add ``--optimizer`` and ``--lr_scheduler``, unless a task has a `configure_optimizers` that `base` has not."""
    if getattr(task, "configure_optimizers", None) is base.configure_optimizers:
        parser.add_optimizer_args((Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)


def use_chosen_optimizer(task: L.LightningModule, optimizer: Any, schedule: Any) -> None:
    """Let a task make the optimizer and the schedule that were chosen, when its parameters exist.

    A schedule makes a step with each optimizer step; ReduceLROnPlateau with each epoch, by its `monitor`.

    Args:
        task: Built.
        optimizer: ``class_path`` and ``init_args``, or None for the task's own.
        schedule: Likewise, or None for a constant rate.

    Raises:
        ValueError: A schedule is chosen without an optimizer.
    """
    if not optimizer:
        if schedule:
            raise ValueError("lr_scheduler: needs an optimizer that it belongs to, such as --optimizer AdamW")
        return
    chosen = _plain(optimizer)
    scheduled = _plain(schedule) if schedule else None

    def configure_optimizers(self: L.LightningModule) -> dict[str, Any]:
        made = instantiate_class([one for one in self.parameters() if one.requires_grad], chosen)
        if scheduled is None:
            return {"optimizer": made}
        scheduler = instantiate_class(made, scheduled)
        settings: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            settings |= {"interval": "epoch", "monitor": scheduler.monitor}
        return {"optimizer": made, "lr_scheduler": settings}

    task.configure_optimizers = MethodType(configure_optimizers, task)  # type: ignore[method-assign]


def _plain(chosen: Any) -> dict[str, Any]:
    return chosen.as_dict() if isinstance(chosen, Namespace) else dict(chosen)
