"""Picture of a training step's time and memory against length, `docs/train_step.svg`, from `docs/train_step.csv`.

    python docs/draw_train_step.py

The numbers are measurements by `benchmarks/train_step.py`; docs/performance.md has their circumstances.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

HERE = Path(__file__).parent
COLOURS = {"this code": "#1f77b4", "AutoModel, as it comes": "#d62728", "AutoModel, best setting": "#ff7f0e"}
AXES = {"seconds": "seconds of CPU time", "megabytes": "peak memory, MB"}


def main(path: Path = HERE / "train_step.svg") -> None:
    """Write the picture; equal inputs give equal bytes."""
    with (HERE / "train_step.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lengths = sorted({int(row["positions"]) for row in rows})
    with pyplot.rc_context({"svg.hashsalt": "dsv41", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure, both = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for axes, (column, title) in zip(both, AXES.items(), strict=True):
            curves = defaultdict(list)
            for row in rows:
                if row[column]:
                    point = (int(row["positions"]), float(row[column]))
                    curves[row["implementation"], row["allocator"]].append(point)
            for (implementation, allocator), points in curves.items():
                label = implementation if allocator == "default" else f"{implementation}, {allocator} allocator"
                style = "-o" if allocator == "default" else "--."
                axes.plot(*zip(*points, strict=True), style, color=COLOURS[implementation], label=label)
            axes.set(xscale="log", yscale="log", xlabel="positions", ylabel=title)
            axes.set_xticks(lengths, [str(length) for length in lengths])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        both[0].legend(frameon=False, fontsize=8, loc="upper left")
        figure.savefig(path, facecolor="white", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
