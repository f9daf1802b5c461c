"""Pictures of curves, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsv41.files import written_whole
from lightning_modules.ablation.curves import Record
from lightning_modules.ablation.intervals import interval, paired
from lightning_modules.ablation.results import group

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(records: Sequence[Record], base: str, path: Path) -> None:
    """Save `curves` as PNG.

    Raises:
        ImportError: As `curves`.
    """
    figure = curves(records, base)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def curves(records: Sequence[Record], base: str) -> Figure:
    """Validation loss by step, with a band from the lowest to the highest seed; beside it the paired difference to the
    base with its 95% interval.

    Raises:
        ImportError: There is no matplotlib; says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('pictures need matplotlib: pip install -e ".[plots]"') from None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    groups = group(records)
    for number, (name, runs) in enumerate(groups.items()):
        color = f"C{number % 10}"
        steps = sorted(set.intersection(*(set(record.curve) for record in runs)))
        losses = [[record.curve[step] for record in runs] for step in steps]
        left.plot(steps, [interval(of).mean for of in losses], color=color, label=f"{name} ({len(runs)})")
        left.fill_between(steps, [min(of) for of in losses], [max(of) for of in losses], color=color, alpha=0.2)
        if name == base or base not in groups:
            continue
        found = []
        for step in steps:
            mine, theirs = (
                {r.seed: r.curve[step] for r in some if r.seed is not None and step in r.curve}
                for some in (runs, groups[base])
            )
            difference = paired(mine, theirs)
            if difference is not None:
                found.append((step, difference.mean, difference.half or 0.0))
        if found:
            at, mean, half = ([point[i] for point in found] for i in range(3))
            right.plot(at, mean, color=color, label=name)
            low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
            right.fill_between(at, low, high, color=color, alpha=0.2)
    right.axhline(0.0, color="grey", linewidth=0.8)
    left.set(xlabel="step", ylabel="validation loss, nats per token", title="mean and range over seeds")
    right.set(xlabel="step", ylabel=f"difference to {base}", title="paired by seed, 95% interval")
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    return figure
