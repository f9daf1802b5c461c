"""Pairs of runs with the same seed: their differences, and the interval with and without pairing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from lightning_modules.ablation.curves import Record
from lightning_modules.ablation.intervals import interval, t_quantile
from lightning_modules.ablation.results import group
from lightning_modules.text import markdown_table


class Pair(NamedTuple):
    """Two runs with the same seed: the same rows in the same order, the same initial values where both have them.

    Attributes:
        seed: Of both.
        base: Validation loss of the base at the end, in nats per token.
        variant: Of the variant.
    """

    seed: int
    base: float
    variant: float

    @property
    def difference(self) -> float:
        """Variant minus base."""
        return self.variant - self.base


def pairs_of(records: Sequence[Record], base: str, variant: str) -> list[Pair]:
    """The seeds that both have, ascending.

    Raises:
        ValueError: There are no runs of one of them, or they have no seed in common.
    """
    groups = group(records)
    for field, name in (("base", base), ("variant", variant)):
        if name not in groups:
            raise ValueError(f"{field}: must be one of {', '.join(groups)}, got {name!r}")
    theirs = {record.seed: record.loss for record in groups[base] if record.seed is not None}
    pairs = [Pair(r.seed, theirs[r.seed], r.loss) for r in groups[variant] if r.seed is not None and r.seed in theirs]
    if not pairs:
        raise ValueError(f"variant: {variant} and {base} have no seed in common")
    return sorted(pairs)


def unpaired_half_width(base_spread: float, variant_spread: float, seeds: int) -> float:
    """`half_width` if the runs of base and variant were not paired: of the difference of two means, equal variances.

    Args:
        base_spread: Standard deviation of the base's loss over seeds.
        variant_spread: Of the variant's.
        seeds: Of each, at least 2.
    """
    return t_quantile(2 * seeds - 2) * math.hypot(base_spread, variant_spread) / math.sqrt(seeds)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """Markdown: a line per seed, then mean and standard deviation, and what follows from them."""
    columns = [[pair.base for pair in pairs], [pair.variant for pair in pairs], [pair.difference for pair in pairs]]

    def line(name: str, values: Sequence[float], signed: bool = True) -> tuple[str, ...]:
        return name, f"{values[0]:.4f}", f"{values[1]:.4f}", f"{values[2]:+.4f}" if signed else f"{values[2]:.4f}"

    rows = [line(str(pair.seed), (pair.base, pair.variant, pair.difference)) for pair in pairs]
    rows.append(line("**mean**", [fmean(column) for column in columns]))
    titles = ("seed", "base", "variant", "difference")
    if len(pairs) == 1:
        return markdown_table(titles, rows, align="rrrr") + "\nOne seed has no spread, and so no interval.\n"
    spreads = [stdev(column) for column in columns]
    rows.append(line("standard deviation", spreads, signed=False))
    found, count = interval(columns[2]), len(pairs)
    assert found.half is not None
    low, high = found.mean - found.half, found.mean + found.half
    verdict = "does not contain zero" if low * high > 0 else "contains zero: either sign would be no surprise"
    return markdown_table(titles, rows, align="rrrr") + (
        f"\n- Paired: {found.mean:+.4f} ± {t_quantile(count - 1):.2f} x {spreads[2]:.4f} / √{count} = "
        f"[{low:+.4f}, {high:+.4f}], which {verdict}.\n"
        f"- Not paired, it would be ± {unpaired_half_width(spreads[0], spreads[1], count):.4f} in place of "
        f"± {found.half:.4f}.\n"
    )
