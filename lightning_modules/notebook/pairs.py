"""Why an ablation compares seed by seed, and what a number of seeds can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from lightning_modules.ablation.curves import Record
from lightning_modules.ablation.intervals import half_width, interval, t_quantile
from lightning_modules.ablation.results import group
from lightning_modules.insight.drawing import new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    lines = ["| seed | base | variant | difference |", "|---|---:|---:|---:|"]
    lines += [f"| {pair.seed} | {pair.base:.4f} | {pair.variant:.4f} | {pair.difference:+.4f} |" for pair in pairs]
    columns = [[pair.base for pair in pairs], [pair.variant for pair in pairs], [pair.difference for pair in pairs]]
    means = [fmean(column) for column in columns]
    lines.append(f"| **mean** | {means[0]:.4f} | {means[1]:.4f} | {means[2]:+.4f} |")
    if len(pairs) == 1:
        return "\n".join([*lines, "", "One seed: there is no spread to tell, and so no interval.", ""])
    spreads = [stdev(column) for column in columns]
    lines.append(f"| standard deviation | {spreads[0]:.4f} | {spreads[1]:.4f} | {spreads[2]:.4f} |")
    found, count = interval(columns[2]), len(pairs)
    assert found.half is not None
    low, high = found.mean - found.half, found.mean + found.half
    verdict = "does not contain zero" if low * high > 0 else "contains zero: either sign would be no surprise"
    return "\n".join(
        [
            *lines,
            "",
            f"- Paired: {found.mean:+.4f} ± {t_quantile(count - 1):.2f} x {spreads[2]:.4f} / √{count} = "
            f"[{low:+.4f}, {high:+.4f}], which {verdict}.",
            f"- Not paired, it would be ± {unpaired_half_width(spreads[0], spreads[1], count):.4f} in place of "
            f"± {found.half:.4f}.",
            "",
        ]
    )


def pairs_picture(records: Sequence[Record]) -> Figure:
    """How far each run ends from the mean of its variant, by seed: pairing takes away what the variants share of it.

    Args:
        records: Runs without a known seed are left out.

    Raises:
        ValueError: Two runs of a variant have the same seed.
    """
    seeds = sorted({record.seed for record in records if record.seed is not None})
    figure, axes = new_axes(max(3.0, 1.2 * len(seeds)), 3.0, "final loss, relative to the variant's mean", bottom=0.6)
    for number, (name, runs) in enumerate(group(records).items()):
        loss = {record.seed: record.loss for record in runs if record.seed is not None}
        at = [seed for seed in seeds if seed in loss]
        offsets = [loss[seed] - fmean(loss.values()) for seed in at]
        axes.plot([seeds.index(seed) for seed in at], offsets, f"C{number}", marker="o", markersize=4, label=name)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(seeds)), [f"seed {seed}" for seed in seeds])
    axes.set_xlim(-0.3, len(seeds) - 0.7)
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def resolution_picture(pairs: Sequence[Pair], most: int = 20) -> Figure:
    """How small a difference a number of seeds could tell from zero, if they spread like those that are there.

    Args:
        pairs: At least 2.
        most: Seeds on the axis.

    Raises:
        ValueError: Fewer pairs than 2, or `most` below 2.
    """
    from matplotlib.ticker import MaxNLocator

    if len(pairs) < 2:
        raise ValueError(f"pairs: must be at least 2 to have a spread, got {len(pairs)}")
    if most < 2:
        raise ValueError(f"most: must be at least 2, got {most}")
    spread = stdev(pair.difference for pair in pairs)
    alone = stdev(pair.base for pair in pairs), stdev(pair.variant for pair in pairs)
    counts = range(2, most + 1)
    figure, axes = new_axes(5.5, 3.0, "half the width of the 95% interval, by the number of seeds")
    axes.plot(counts, [unpaired_half_width(*alone, count) for count in counts], marker=".", label="not paired")
    axes.plot(counts, [half_width(spread, count) for count in counts], marker=".", label="paired")
    found = abs(fmean(pair.difference for pair in pairs))
    axes.axhline(found, color="grey", linestyle="--", linewidth=0.9, label="the difference found")
    axes.axvline(len(pairs), color="grey", linewidth=0.9, label="seeds that were run")
    axes.set(xlabel="seeds", ylabel="nats per token", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure
