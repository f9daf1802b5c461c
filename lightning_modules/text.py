"""Names in messages: all of a few, the first of many."""

from __future__ import annotations

from collections.abc import Iterable


def first_few(names: Iterable[str], count: int = 5) -> str:
    """The first `count` names, separated by commas, and how many more there are."""
    listed = list(names)
    rest = len(listed) - count
    return ", ".join(listed[:count]) + (f" and {rest} more" if rest > 0 else "")
