"""Comparison of runs by ``dsv41 compare``: the table of a study from event files of any origin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modules.ablation.curves import NoLossError, Record, read_run, run_directories
from lightning_modules.ablation.results import markdown, notes_on, summarise
from lightning_modules.options.paths import expanded


def _named(word: str) -> tuple[str | None, Path]:
    """Name and path of ``NAME=PATH``; no name for ``PATH``."""
    name, equals, path = word.partition("=")
    return (name, Path(path)) if equals and name and not Path(word).exists() else (None, Path(word))


def records_of(words: Sequence[str]) -> list[Record]:
    """Runs in or below directories, in the order given.

    Args:
        words: Directories of runs, or folders above them, each with an optional ``NAME=`` before it.

    Raises:
        FileNotFoundError: No event files under a directory.
        NoLossError: A directory, or all of a folder, has no validation loss. Of several in a folder those without are
            left out, and named on stderr.
    """
    records: list[Record] = []
    for word in words:
        name, path = _named(word)
        path = Path(expanded(str(path), "RUN"))
        found: list[Record] = []
        empty: list[NoLossError] = []
        for directory in run_directories(path):
            try:
                found.append(read_run(directory, name))
            except NoLossError as error:
                empty.append(error)
        if not found:
            raise empty[0]
        for reason in empty:
            print(f"left out: {reason}", file=sys.stderr)
        records += found
    return records


def compare(words: Sequence[str], base: str | None = None) -> str:
    """Text that ``dsv41 compare RUN...`` prints.

    Args:
        words: As in `records_of`.
        base: Variant that differences are to; None takes that of the first run.

    Raises:
        FileNotFoundError: As `records_of`.
        ValueError: As `records_of`; two runs have the same name and seed, or there is no such base.
    """
    records = records_of(words)
    names = list(dict.fromkeys(record.variant for record in records))
    if base is None:
        base = names[0] if "base" not in names else "base"
    elif base not in names:
        raise ValueError(f"--base: must be one of {', '.join(names)}, got {base!r}")
    rows = summarise(sorted(records, key=lambda record: record.variant != base), base)
    return markdown(rows, base, notes_on(rows, base))
