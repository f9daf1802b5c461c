"""Drawing for TensorBoard: axes of a given size, heat maps, and what a figure or a text needs to get there.

matplotlib is imported where something is drawn: it takes a second that a command without pictures need not wait for.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
import numpy.typing as npt
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_modules.insight.hooks import WITHIN
from lightning_modules.training.lightning_private import logged_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Array = npt.NDArray[Any]

# ------------------------------------------------------------------ TensorBoard


def boards(trainer: L.Trainer) -> list[Any]:
    """SummaryWriters of a trainer's TensorBoard loggers, on rank 0; none elsewhere."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def pixels(figure: Figure) -> Array:
    """A figure as uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a token in a script without a font
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def show(trainer: L.Trainer, name: str, figure: Figure) -> None:
    """Add a figure to TensorBoard as ``within/NAME``."""
    image = pixels(figure)
    for board in boards(trainer):
        board.add_image(f"{WITHIN}/{name}", image, logged_step(trainer), dataformats="HWC")


def show_constant(trainer: L.Trainer, name: str, markdown: str) -> None:
    """Add a text to TensorBoard as ``within/constants/NAME``, for numbers that do not change in a run."""
    for board in boards(trainer):
        board.add_text(f"{WITHIN}/constants/{name}", markdown, logged_step(trainer))


# ------------------------------------------------------------------ figures


def new_axes(width: float, height: float, title: str, left: float = 0.8, bottom: float = 1.0) -> tuple[Figure, Axes]:
    """A figure and its axes of a size in inches, with margins for labels.

    The figure is not one of pyplot's, which keeps what it makes. Margins are given, since finding them takes
    matplotlib as long as drawing.
    """
    from matplotlib.figure import Figure

    right, top = 0.3, 0.5
    whole = (left + width + right, bottom + height + top)
    figure = Figure(figsize=whole, dpi=100)
    figure.suptitle(title, fontsize=10)
    figure.subplots_adjust(left / whole[0], bottom / whole[1], 1 - right / whole[0], 1 - top / whole[1])
    return figure, figure.subplots()


def colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str, extend: str = "neither") -> None:
    """Add a colour bar right of `axes`, in a width that does not depend on theirs."""
    inch = 1 / figure.get_figwidth()
    figure.colorbar(image, ax=axes, label=label, extend=extend, fraction=0.9 * inch, pad=0.15 * inch, aspect=15)


def heat_map(
    axes: Axes,
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    low: float,
    high: float,
    colours: str = "viridis",
) -> AxesImage:
    """Draw `values` [rows, columns] with a name for each row and column; an empty list of names leaves them out."""
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto", interpolation="nearest")
    # As text, or a "$" in a token would begin a formula.
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=7, parse_math=False)
    return image
