"""Texts of tokens in Markdown."""

from __future__ import annotations

import re


def code(text: str) -> str:
    """A code span that shows any text as it is: also what would be a formula, a heading or the span's own end.

    Args:
        text: Without line breaks; `readable` makes white space visible.
    """
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def code_cell(text: str) -> str:
    """`code` for a cell of a table, which a bar would end."""
    return code(text).replace("|", "\\|")
