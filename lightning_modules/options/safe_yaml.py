"""Safe YAML for untrusted files: plain values only, in number bounded by the file's length.

PyYAML's safe loaders build no objects, but an alias may stand inside what it names, which makes a value without end,
and aliases of aliases make a value of any size out of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

_DEEPEST = 64
_MOST_VALUES = 1_000_000
_EVENTS = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def require_finite(text: str) -> None:
    """Raise unless the values of a YAML text, with aliases expanded, are finite and few.

    Raises:
        YAMLError: An alias stands inside what it names, values are nested deeper than 64 levels or more than a million,
            or `text` is no YAML.
    """
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_EVENTS):
        place = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise yaml.YAMLError(f"{place}: the alias *{event.anchor} stands inside what it names, without end")
            count += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
            if len(opened) > _DEEPEST:
                raise yaml.YAMLError(f"{place}: nested deeper than {_DEEPEST} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = count - before
        if count > _MOST_VALUES:
            raise yaml.YAMLError(f"{place}: more than {_MOST_VALUES:,} values, aliases written out")


def load_plain(text: str, load: Callable[[str], Any] = yaml.safe_load) -> Any:
    """Value of a YAML text.

    Args:
        text: The text.
        load: Builds the value; a safe loader of PyYAML.

    Raises:
        YAMLError: See `require_finite`; or a value is none that Python has, such as an integer of 5,000 digits.
    """
    require_finite(text)
    try:
        return load(text)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from None
