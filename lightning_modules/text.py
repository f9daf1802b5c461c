"""Text for people: lists of names, tables, counts, sizes, durations, and texts of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

# ------------------------------------------------------------------ names and numbers


def first_few(names: Iterable[str], count: int = 5) -> str:
    """The first `count` names, separated by commas, and how many more there are."""
    listed = list(names)
    rest = len(listed) - count
    return ", ".join(listed[:count]) + (f" and {rest} more" if rest > 0 else "")


def readable_size(count: float) -> str:
    """Bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def readable_count(count: float) -> str:
    """A count with a decimal prefix: ``1.5 M``."""
    for unit in ("", " k", " M", " G"):
        if count < 1000:
            return f"{count:,.1f}{unit}"
        count /= 1000
    return f"{count:,.1f} T"


def duration(seconds: float) -> str:
    """Seconds below half a minute, else whole minutes, and hours from one on: ``2 h 05 min``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


# ------------------------------------------------------------------ tables


def plain_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table for a terminal: columns as wide as needed, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]], align: str | None = None) -> str:
    """A Markdown table that ends with a line break.

    Args:
        titles: Of the columns.
        rows: Cells, as many as titles; shown with `str`.
        align: A letter per column, "l" or "r"; None is the first to the left and the others to the right.

    Raises:
        ValueError: A row or `align` has another number of columns than `titles`.
    """
    align = "l" + "r" * (len(titles) - 1) if align is None else align
    lines = [list(titles), *([str(cell) for cell in row] for row in rows)]
    for line in (align, *lines):
        if len(line) != len(titles):
            raise ValueError(f"rows: must have {len(titles)} cells each, got {line}")
    shown = [f"| {' | '.join(line)} |" for line in lines]
    shown.insert(1, "|" + "".join("---:|" if side == "r" else "---|" for side in align))
    return "\n".join(shown) + "\n"


# ------------------------------------------------------------------ texts of tokens


def token_texts(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """The text of each token by itself, special tokens included.

    Args:
        tokenizer: Of the tokenizers library or of transformers.
        ids: Of the tokens; a tensor [S] will do.
    """
    return [tokenizer.decode([int(token)], skip_special_tokens=False) for token in ids]


def readable(text: str, longest: int | None = 12) -> str:
    """A token's text on one line: white space made visible, cut to `longest` characters; None shows all of it."""
    # The bar in the special tokens of DeepSeek is a full-width one, which fonts lack.
    shown = repr(text)[1:-1].replace(" ", "·").replace("｜", "|")
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 1]}…"


def code(text: str) -> str:
    """A Markdown code span that shows any text as it is: also what would be a formula, a heading or the span's end.

    Args:
        text: Without line breaks; `readable` makes white space visible.
    """
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def code_cell(text: str) -> str:
    """`code` for a cell of a table, which a bar would end."""
    return code(text).replace("|", "\\|")
