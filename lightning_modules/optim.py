"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

ScheduleName = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW.

    Args:
        lr: Peak learning rate.
        weight_decay: Decoupled decay of matrices. Norms, sinks, mHC coefficients and embeddings are not decayed.
        beta1: Decay of the gradient's average.
        beta2: Decay of the squared gradient's average.
        eps: Added to the root of the squared average.
    """

    lr: float = 2e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr: must be above 0, got {self.lr}")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay: must be at least 0, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}: must lie in [0, 1), got {getattr(self, name)}")
        if self.eps <= 0:
            raise ValueError(f"optimizer.eps: must be above 0, got {self.eps}")


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
    """

    name: ScheduleName = "cosine"
    warmup_steps: int = 100
    floor: float = 0.1
    decay_share: float = 0.2
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ValueError(f"schedule.name: must be one of {get_args(ScheduleName)}, got {self.name!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps: must be at least 0, got {self.warmup_steps}")
        for name in ("floor", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}: must lie in 0..1, got {getattr(self, name)}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"schedule.total_steps: must be at least 1, got {self.total_steps}")


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


# By the end of a parameter's name: vectors in disguise, and rows that are looked up rather than multiplied.
UNDECAYED_SUFFIXES = ("embed_tokens.weight", "engram.embed.weight", "engram.q_weight", "engram.k_weight")


def group_settings(config: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """What the configuration sets for each group, by the group's name; anything else in a group is state."""
    common = {"initial_lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    return {
        "decay": common | {"weight_decay": config.weight_decay},
        "no_decay": common | {"weight_decay": 0.0},
    }


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Split trainable parameters into "decay" (matrices) and "no_decay" (vectors, embeddings, table rows).

    Returns:
        Groups for a torch optimizer, each with a `name`; an empty one is left out.
    """
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            undecayed = parameter.dim() < 2 or name.endswith(UNDECAYED_SUFFIXES)
            members["no_decay" if undecayed else "decay"].append(parameter)
    settings = group_settings(config)
    return [
        {"name": name, "params": parameters, "lr": config.lr} | settings[name]
        for name, parameters in members.items()
        if parameters
    ]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`; torch's fused kernel (8x faster than the default on a CPU)."""
    return torch.optim.AdamW(parameter_groups(module.named_parameters(), config), fused=True)


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Norm of all gradients together, of their rows on all ranks where they are sharded: a plain scalar."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a scalar; they may be on different devices, when some are offloaded."""
    devices: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        devices.setdefault(gradient.device, []).append(gradient)
    for device, members in devices.items():
        torch._foreach_mul_(members, factor.to(device))


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
