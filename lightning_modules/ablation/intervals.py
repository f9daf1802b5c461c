"""Means over seeds, and confidence intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


def t_probability(t: float, degrees: int) -> float:
    """P(|T| <= t) of Student's t distribution (Abramowitz and Stegun 26.7.3 and 26.7.4).

    Args:
        t: At least 0.
        degrees: Degrees of freedom, at least 1.
    """
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = math.cos(angle) if degrees % 2 else 1.0
    for k in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if degrees % 2 else math.sin(angle) * total


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = `confidence`, by bisection.

    Raises:
        ValueError: `degrees` is below 1, or `confidence` not between 0 and 1.
    """
    if degrees < 1:
        raise ValueError(f"degrees: must be at least 1, got {degrees}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: must lie between 0 and 1, got {confidence}")
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Interval:
    """Mean over seeds and its confidence interval.

    Attributes:
        mean: Over seeds.
        half: Half the width of the 95% confidence interval; None with one seed.
        count: Seeds.
    """

    mean: float
    half: float | None
    count: int


def half_width(spread: float, count: int) -> float:
    """Half of Student's 95% interval of a mean.

    Args:
        spread: Standard deviation of the values.
        count: Their number, at least 2.
    """
    return t_quantile(count - 1) * spread / math.sqrt(count)


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student's 95% confidence interval of at least one value."""
    half = half_width(stdev(values), len(values)) if len(values) > 1 else None
    return Interval(fmean(values), half, len(values))


def paired(values: dict[int, float], base: dict[int, float]) -> Interval | None:
    """Interval of the differences to the base at each seed that both have; None if there is none."""
    differences = [values[seed] - base[seed] for seed in sorted(values) if seed in base]
    return interval(differences) if differences else None
