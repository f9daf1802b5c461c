"""Files and folders that appear whole or not at all.

What is being written has another name in the same directory, ``NAME.<32 hex digits>.partial``, and gets its own when it
is complete. A folder says so itself: its marker, written last, lists its files with their sizes. What is being deleted is
renamed first (``.deleted``), so that half of it is never mistaken for the whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

MARKER = "complete.json"
_LEFTOVER = re.compile(r"^(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>partial|replaced|deleted)$")


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{uuid4().hex}.{kind}")


def _flush(path: Path) -> None:
    """Put a file, or the names in a directory, on the disk: or a power cut could leave a new name with nothing in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file so that other processes see either nothing or all of it.

    The file is written under another name in the same folder, flushed to the disk and renamed. When two processes write
    the same file at once, the last one wins, so both should write the same content. If the block raises, nothing is
    left; a killed process leaves a file that ends in ``.partial``.

    Args:
        path: Where the file is to appear. Its folder is made if needed.

    Yields:
        The path to write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "partial")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def begin_folder(path: Path) -> Path:
    """Make the folder that is to become `path` once it is complete, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "partial")
    partial.mkdir()
    return partial


def publish_folder(partial: Path, path: Path, about: dict[str, Any]) -> None:
    """Mark a folder as complete and give it its name, in place of whatever has it.

    A kill between the two renames of a replacement leaves no `path`, but a complete folder, which `settle` finds.

    Args:
        partial: From `begin_folder`, its files written and flushed.
        path: Its name.
        about: Plain values to keep in the marker.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    marker = partial / MARKER
    marker.write_text(json.dumps(about | {"files": sizes}, indent=1))
    _flush(marker)
    _flush(partial)
    if path.exists():
        replaced = _beside(path, "replaced")
        path.rename(replaced)
        partial.rename(path)
        _flush(path.parent)
        remove_whole(replaced)
    else:
        partial.rename(path)
        _flush(path.parent)


def is_complete(path: Path) -> bool:
    """Whether `path` is a file, or a folder whose marker is there and agrees with the sizes of all its files."""
    if not path.is_dir():
        return path.is_file()
    try:
        sizes = json.loads((path / MARKER).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def remove_whole(path: Path) -> None:
    """Delete a file or a folder; nothing happens if there is none. A kill in the middle leaves no half of it."""
    if path.is_dir():
        deleted = _beside(path, "deleted")
        path.rename(deleted)
        shutil.rmtree(deleted)
    else:
        path.unlink(missing_ok=True)


def settle(directory: Path, clear: bool = False) -> list[str]:
    """Give complete folders the name that a kill during their publication kept from them.

    Args:
        directory: Where checkpoints are kept.
        clear: Also delete what killed saves and deletions left. Only for the one process that writes here.

    Returns:
        Names of the incomplete leftovers, deleted or not.
    """
    left = []
    # "partial" before "replaced": the newer of two complete folders that wait for the same name.
    for path in sorted(directory.glob("*.*"), key=lambda path: path.suffix):
        match = _LEFTOVER.match(path.name)
        if match is None:
            continue
        target = directory / match["name"]
        # What has been replaced was whole; of what was being written, only a folder can say so.
        waits = match["kind"] == "replaced" or (match["kind"] == "partial" and path.is_dir())
        if waits and not target.exists() and is_complete(path):
            with suppress(OSError):  # another process has just done it
                path.rename(target)
            continue
        left.append(path.name)
        if clear:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return left
