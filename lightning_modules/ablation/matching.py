"""Resizing of a variant to the base's parameters or operations, by the number or the width of its experts.

Both measures grow by the same amount with each expert, or each channel of the experts, so two values
determine the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_modules.ablation.cost import Cost
from lightning_modules.ablation.study import Match

FIELDS: dict[Match, str] = {"parameters": "n_routed_experts", "flops": "moe_intermediate_size"}
TOLERANCE = 0.01  # beyond which a match is reported as failed


@dataclass(frozen=True)
class Matched:
    """Resizing of a variant: field values before and after.

    Attributes:
        match: "parameters" or "flops".
        before: Value of the field.
        after: Its new value.
    """

    match: Match
    before: int
    after: int

    def __str__(self) -> str:
        return f"{FIELDS[self.match]} {self.before} -> {self.after}"


def ratio(match: Match, cost: Cost, base: Cost) -> float:
    """The variant's parameters, or operations, as a share of the base's."""
    return cost.parameters / base.parameters if match == "parameters" else cost.flops / base.flops


def warning(name: str, match: Match, achieved: float) -> str | None:
    """Warning where a variant is more than `TOLERANCE` off the base; else None."""
    if abs(achieved - 1) <= TOLERANCE:
        return None
    return f"WARNING: {name} is not matched: it has {achieved:.4f} of the base's {match}"


def resize(match: Match, before: int, lowest: int, base: Cost, cost_with: Callable[[int], Cost]) -> Matched:
    """Find the value of `FIELDS[match]` that comes nearest to the base.

    Args:
        match: "parameters" or "flops".
        before: The field's value now.
        lowest: Its lowest one.
        base: What to come near to.
        cost_with: The variant's cost with another value.
    """
    here = ratio(match, cost_with(before), base)
    per_unit = ratio(match, cost_with(before + 1), base) - here
    exact = before + (1 - here) / per_unit
    candidates = {max(lowest, math.floor(exact)), max(lowest, math.ceil(exact))}
    after = min(candidates, key=lambda value: (abs(ratio(match, cost_with(value), base) - 1), value))
    return Matched(match, before, after)
