"""Picture of the architecture, `docs/architecture.svg`: one block, and the roles of the released layers below it.

    python docs/draw_architecture.py

The roles are those of `dsv41.schedule` for the released configuration.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from dsv41 import DeepseekV41TextConfig
from dsv41.schedule import layer_plans

PICTURE = Path(__file__).with_name("architecture.svg")
INK, STREAM = "#24292f", "#6e7781"
ENGRAM, MIXING, ATTENTION, EXPERTS, PLAIN = "#f6c177", "#b8c0ff", "#8ecae6", "#a3d9a5", "#e6e8eb"
ROLES = {"window": PLAIN, "Full": "#1f77b4", "Reindex": "#8ecae6", "Reuse": "#dcecf6"}
LANES = [4.15, 4.38, 4.61, 4.84]  # the residual streams, C = 4


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, size: float = 9) -> None:
    """Rounded box with its lower left corner at (x, y) and `text` in its middle."""
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", fc=colour, ec=INK, lw=0.8, zorder=3
        )
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK, zorder=4)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    """Arrow between two points."""
    options: dict[str, object] = {"arrowstyle": "-|>", "mutation_scale": 9, "lw": 1.1, "color": INK, "zorder": 2}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **(options | style)))


def site(axes: Axes, x: float, name: str, colour: str) -> None:
    """One site: read from the streams, norm, sublayer, and the mixing that writes back, which begins at x + 1.9."""
    middle = LANES[0] - 1.95
    arrow(axes, (x + 0.3, LANES[0]), (x + 0.3, middle + 1.2))
    axes.text(x + 0.22, LANES[0] - 0.28, "read", ha="right", fontsize=8, color=INK)
    box(axes, x - 0.15, middle + 0.85, 0.9, 0.35, "RMSNorm", PLAIN, 7.5)
    arrow(axes, (x + 0.3, middle + 0.85), (x + 0.3, middle + 0.62))
    box(axes, x - 0.45, middle - 0.55, 2.0, 1.17, name, colour, 8.5)
    arrow(axes, (x + 1.55, middle), (x + 2.3, LANES[0] - 0.2), connectionstyle="angle,angleA=0,angleB=90,rad=4")
    axes.text(x + 2.22, LANES[0] - 0.6, "post", ha="right", fontsize=8, color=INK)
    box(axes, x + 1.9, LANES[0] - 0.2, 0.85, 1.09, "mHC\nmix", MIXING, 8.5)


def draw_block(axes: Axes) -> None:
    """Streams from left to right through one block, its sublayers below them."""
    for lane in LANES:
        arrow(axes, (1.25, lane), (11.35, lane), color=STREAM, lw=1.6, zorder=1, mutation_scale=7)
    box(axes, 0.1, 3.95, 1.15, 1.09, "embedding\n$\\rightarrow$ 4 equal\nstreams", PLAIN, 8)
    axes.add_patch(Rectangle((1.6, 1.3), 8.55, 4.45, fc="none", ec=STREAM, lw=1, ls=(0, (4, 3)), zorder=0))
    axes.text(1.72, 5.5, "one of 40 blocks", fontsize=8.5, color=STREAM, va="center")
    box(axes, 1.85, LANES[0] - 0.2, 1.05, 1.09, "Engram\n(layers\n1, 14)", ENGRAM, 8.5)
    box(axes, 1.72, 1.65, 1.3, 1.17, "hashed 2- to\n4-grams $\\rightarrow$ rows\nof a table,\ngated", ENGRAM, 7.5)
    arrow(axes, (2.37, 2.82), (2.37, LANES[0] - 0.2))
    site(axes, 3.75, "CSA2 attention\nwindow + selected\nshared positions\n+ sink", ATTENTION)
    site(axes, 7.25, "MoE\n6 of 384 experts\n+ a shared one", EXPERTS)
    # Single pass: a site reads with the `pre` that the mixing before it has predicted.
    carried = {"color": "#5a4fcf", "ls": (0, (3, 2)), "connectionstyle": "arc3,rad=-0.42"}
    arrow(axes, (6.1, LANES[-1] + 0.2), (7.5, LANES[-1] + 0.05), **carried)
    axes.text(
        6.8,
        5.5,
        "pre: how the next site reads, also across blocks",
        ha="center",
        va="center",
        fontsize=8,
        color="#5a4fcf",
    )
    box(axes, 11.35, 3.95, 1.15, 1.09, "collapse,\nRMSNorm,\nhead, loss", PLAIN, 8)


def draw_roles(axes: Axes) -> None:
    """One coloured cell per layer of the released model, and who owns the keys and selections that it reads."""
    plans = layer_plans(DeepseekV41TextConfig())
    width, left = 10.9 / len(plans), 1.6
    axes.text(0.1, 0.47, "layers of\nthe release", fontsize=8.5, color=INK, va="center")
    for plan in plans:
        x = left + plan.layer * width
        axes.add_patch(Rectangle((x, 0.3), width, 0.35, fc=ROLES[plan.role], ec="white", lw=0.8, zorder=2))
        if plan.role in ("Full", "Reindex"):
            axes.text(x + width / 2, 0.16, str(plan.layer), ha="center", va="center", fontsize=7, color=INK)
    meaning = {
        "window": "window only",
        "Full": "Full: makes compressed keys and a selection",
        "Reindex": "Reindex: makes a selection of shared keys",
        "Reuse": "Reuse: takes both",
    }
    for role, x in zip(meaning, (1.6, 3.1, 6.65, 10.1), strict=True):
        axes.add_patch(Rectangle((x, 0.82), 0.2, 0.2, fc=ROLES[role], ec=INK, lw=0.5))
        axes.text(x + 0.28, 0.92, meaning[role], fontsize=8, va="center", color=INK)


def main(path: Path = PICTURE) -> None:
    """Write the picture; equal inputs give equal bytes."""
    with pyplot.rc_context({"svg.hashsalt": "dsv41", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        figure, axes = pyplot.subplots(figsize=(10.5, 4.9))
        figure.subplots_adjust(0, 0, 1, 1)
        axes.set(xlim=(0, 12.6), ylim=(0, 5.88))
        axes.axis("off")
        draw_block(axes)
        draw_roles(axes)
        # An opaque ground, so that dark pages show it as light ones do.
        figure.savefig(path, facecolor="white", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
