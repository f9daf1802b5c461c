"""Learning rate over the optimizer steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from dsv41.config.fields import POSITIONS, Real, Rule, Whole

ScheduleName = Literal["cosine", "wsd", "constant"]

RULES: dict[str, Rule] = {
    "warmup_steps": Whole(0, POSITIONS),
    "floor": Real(0, 1),
    "decay_share": Real(0, 1),
    "total_steps": Whole(1, POSITIONS, "for the trainer's"),
}
"""Ranges of the numbers of `ScheduleConfig`."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over optimizer steps: linear warm-up, then one of three shapes.

    Args:
        name: "cosine" to the floor at the last step; "wsd" (warm-up, stable, decay): constant, then linear to the
            floor; "constant".
        warmup_steps: Steps of the linear warm-up; the first step already moves.
        floor: Final rate as a share of the peak.
        decay_share: Share of all steps that "wsd" decays over, at the end.
        total_steps: Length of the schedule; None takes the trainer's number of optimizer steps.

    Raises:
        ValueError: A value is out of range; names the field.
    """

    name: ScheduleName = "cosine"
    warmup_steps: int = 100
    floor: float = 0.1
    decay_share: float = 0.2
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ValueError(f"schedule.name: must be one of {get_args(ScheduleName)}, got {self.name!r}")
        for name, rule in RULES.items():
            rule.check(f"schedule.{name}", getattr(self, name))


def learning_rate_factor(step: int, total: float, config: ScheduleConfig) -> float:
    """Learning rate of the optimizer step after `step` finished ones, as a share of the peak.

    Args:
        step: Optimizer steps done so far.
        total: Steps of the whole run; infinite is allowed for "constant".
        config: The shape.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.name == "constant":
        return 1.0
    last = max(total - 1, config.warmup_steps)
    begin = config.warmup_steps if config.name == "cosine" else max(last - config.decay_share * total, 0)
    if step <= begin:
        return 1.0
    # A run may end with its warm-up, and the schedule is asked once more after the last step.
    progress = min((step - begin) / max(last - begin, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape


def build_schedule(optimizer: torch.optim.Optimizer, config: ScheduleConfig, trainer_steps: float) -> LambdaLR:
    """Schedule per optimizer step.

    Args:
        optimizer: Its groups keep their own peak.
        config: The shape.
        trainer_steps: Length if `config.total_steps` is None.

    Raises:
        ValueError: The shape needs a length and there is none.
    """
    total = trainer_steps if config.total_steps is None else config.total_steps
    if config.name != "constant" and not math.isfinite(total):
        raise ValueError(
            f"schedule.total_steps: {config.name!r} needs the number of steps; set it, trainer.max_steps or max_epochs"
        )
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, total, config))
