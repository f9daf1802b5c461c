"""Files and folders that appear whole or not at all.

What is being written has another name in the same directory, ``NAME.<32 hex digits>.partial``, and gets its own when it
is complete. A folder says so itself: its marker, written last, lists its files with their sizes. What is being deleted
is renamed first (``.deleted``), so that half of it is never mistaken for the whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

logger = logging.getLogger(__name__)

MARKER = "complete.json"
_LEFTOVER = re.compile(r"^(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>partial|replaced|deleted)$")


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{uuid4().hex}.{kind}")


def _flush(path: Path) -> None:
    """Put a file, or a directory's names, on the disk: or a power cut could leave a new name with nothing in it."""
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
        _take_name(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _take_name(partial: Path, path: Path) -> None:
    """Give `partial` its name, in place of whatever has it.

    A file takes a file's place in one step. Where a folder is involved, a kill between the two renames leaves no
    `path`, but something whole that waits for the name: see `settle`.
    """
    if not path.is_dir() and not (partial.is_dir() and path.exists()):
        os.replace(partial, path)
        _flush(path.parent)
        return
    replaced = _beside(path, "replaced")
    path.rename(replaced)
    try:
        partial.rename(path)
    except OSError:
        replaced.rename(path)
        raise
    _flush(path.parent)
    discard(replaced)


def begin_folder(path: Path) -> Path:
    """Make the folder that is to become `path` once it is complete, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "partial")
    partial.mkdir()
    return partial


def publish_folder(partial: Path, path: Path, about: dict[str, Any]) -> None:
    """Mark a folder as complete and give it its name, in place of whatever has it.

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
    _take_name(partial, path)


def is_complete(path: Path) -> bool:
    """Whether `path` is a file, or a folder whose marker is there and agrees with the sizes of all its files."""
    if not path.is_dir():
        return path.is_file()
    try:
        sizes = json.loads((path / MARKER).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def remove_whole(path: Path) -> None:
    """Delete a file or a folder; nothing happens if there is none. A kill in the middle leaves no half of it."""
    if path.is_dir():
        deleted = _beside(path, "deleted")
        path.rename(deleted)
        shutil.rmtree(deleted)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """`remove_whole`, where failing to delete what nobody needs any more is no reason to end a run."""
    try:
        remove_whole(path)
    except OSError as error:
        logger.warning("could not delete %s: %s", path, error)


def _waits_for_its_name(path: Path, kind: str) -> bool:
    # What has been replaced was whole; of what was being written, only a folder can say so.
    return (kind == "replaced" or (kind == "partial" and path.is_dir())) and is_complete(path)


def whole_names(directory: Path) -> dict[str, Path]:
    """What is complete in a directory, by name. Renames nothing, so that it may be asked while a run writes there.

    Returns:
        Paths by name; where a kill during publication left nothing under the name, the newest that waits for it.
    """
    waiting: dict[str, Path] = {}
    # "partial" before "replaced": the newer of two that wait for the same name.
    for path in sorted(directory.glob("*.*"), key=lambda path: path.suffix):
        match = _LEFTOVER.match(path.name)
        if match and _waits_for_its_name(path, match["kind"]):
            waiting.setdefault(match["name"], path)
    # Names second: what is published in between is found either waiting or under its name.
    named = {path.name: path for path in directory.glob("*") if not _LEFTOVER.match(path.name) and is_complete(path)}
    return waiting | named


def plain_name(path: Path) -> Path:
    """The name that a path of `whole_names` has or waits for."""
    match = _LEFTOVER.match(path.name)
    return path.with_name(match["name"]) if match else path


def settle(directory: Path) -> list[str]:
    """Tidy a directory after kills: what is complete gets its name, the rest goes. Only for the one that writes there.

    Returns:
        Names of what was deleted.
    """
    for name, path in whole_names(directory).items():
        if path.name != name:
            remove_whole(directory / name)  # incomplete, or nothing would wait for the name
            path.rename(directory / name)
    left = [path for path in directory.glob("*.*") if _LEFTOVER.match(path.name)]
    for path in left:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return [path.name for path in left]
