"""Cost of a study's model: parameters and operations."""

from __future__ import annotations

from dataclasses import dataclass

from dsv41.config import DeepseekV41TextConfig
from dsv41.cost import flops_per_sequence
from lightning_modules.budget import active_parameters, named_parameters


@dataclass(frozen=True)
class Cost:
    """Cost of one configuration.

    Attributes:
        parameters: Number of parameters.
        active: Parameters that a token reads.
        flops: Training FLOPs per token, the mean over a sequence.
    """

    parameters: int
    active: int
    flops: float


def cost_of(config: DeepseekV41TextConfig, length: int) -> Cost:
    """Cost of a configuration whose vocabulary is known, with sequences of `length`.

    Raises:
        ValueError: As `flops_per_sequence`.
    """
    parameters = named_parameters(config)
    return Cost(
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        active=sum(active_parameters(config, parameters).values()),
        flops=sum(part.training for part in flops_per_sequence(config, length).values()) / length,
    )
