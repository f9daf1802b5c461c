"""Pictures for TensorBoard, drawn where matplotlib is installed (the ``plots`` extra)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
import numpy.typing as npt
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_modules.training.lightning_private import logged_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Array = npt.NDArray[Any]


def boards(trainer: L.Trainer) -> list[Any]:
    """The SummaryWriters of a trainer's TensorBoard loggers, on rank 0; none elsewhere."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def drawing_boards(trainer: L.Trainer) -> list[Any]:
    """`boards`, or none without matplotlib."""
    return boards(trainer) if importlib.util.find_spec("matplotlib") is not None else []


def new_axes(width: float, height: float, title: str, left: float = 0.8, bottom: float = 1.0) -> tuple[Figure, Axes]:
    """A figure and its axes of a size in inches, with margins for what is written beside them.

    The figure belongs to nobody else: pyplot, which keeps what it makes, has no part. Margins are given, since finding
    them takes matplotlib as long as drawing.
    """
    from matplotlib.figure import Figure

    right, top = 0.3, 0.5
    whole = (left + width + right, bottom + height + top)
    figure = Figure(figsize=whole, dpi=100)
    figure.suptitle(title, fontsize=10)
    figure.subplots_adjust(left / whole[0], bottom / whole[1], 1 - right / whole[0], 1 - top / whole[1])
    return figure, figure.subplots()


def colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str, extend: str = "neither") -> None:
    """Say right of `axes`, in a width that does not depend on theirs, what the colours mean."""
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


def pixels(figure: Figure) -> Array:
    """uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a token in a script without a font
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def show(trainer: L.Trainer, tag: str, figure: Figure) -> None:
    """Add a figure to TensorBoard."""
    image = pixels(figure)
    for board in boards(trainer):
        board.add_image(tag, image, logged_step(trainer), dataformats="HWC")
