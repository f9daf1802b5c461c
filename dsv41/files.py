"""Files and folders that appear whole or not at all, and the folder for caches.

What is being written has another name in the same directory, ``NAME.<32 hex digits>.partial``, and gets its own when it
is complete. A folder says so itself: its marker, written last, lists its files with their sizes and checksums. What is
being deleted is renamed first (``.deleted``), so that half of it is never mistaken for the whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

logger = logging.getLogger(__name__)

MARKER = "complete.json"
_LEFTOVER = re.compile(r"^(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>partial|replaced|deleted)$")
# A full disk, a spent quota, the limit on the size of a file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedFileError(ValueError):
    """A file whose checksum is not that of what was written."""


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


def os_error_behind(error: BaseException) -> OSError | None:
    """The OSError that `error` is or comes from: a full disk turns into a RuntimeError inside torch's zip writer."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def unwritten(path: Path, reason: str, code: int | None, needed: int = 0) -> OSError:
    """The error of a write that has failed: what, why, how much room there is, and that nothing is lost.

    Args:
        path: What was to be written.
        reason: Why it was not.
        code: `errno` of the failure, if known; what is free is said where it matters.
        needed: About how many bytes `path` would have had, if known.
    """
    room = ""
    if code in _NO_ROOM:
        with suppress(OSError):
            free = shutil.disk_usage(next(parent for parent in path.absolute().parents if parent.is_dir())).free
            room = f" (about {needed / 1e6:,.1f} MB were needed" if needed else " ("
            room += f"{', ' if needed else ''}{free / 1e6:,.1f} MB are free there)"
    text = f"{path} could not be written: {reason}{room}; what was complete before is untouched"
    return OSError(text) if code is None else OSError(code, text)


@contextmanager
def write_failures_explained(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise `unwritten` for what fails in the block because of the disk; the arguments are those of `unwritten`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise unwritten(path, cause.strerror or str(cause), cause.errno, needed) from error


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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(
    partial: Path, path: Path, about: dict[str, Any], checksums: Mapping[str, str] | None = None
) -> None:
    """Mark a folder as complete and give it its name, in place of whatever has it.

    Args:
        partial: From `begin_folder`, its files written and flushed.
        path: Its name.
        about: Plain values to keep in the marker.
        checksums: `sha256_of` of files that who wrote them knows already; the others are read once more.
    """
    files = sorted(partial.iterdir())
    sizes = {file.name: file.stat().st_size for file in files}
    known = checksums or {}
    sums = {file.name: known.get(file.name) or sha256_of(file) for file in files}
    marker = partial / MARKER
    marker.write_text(json.dumps(about | {"files": sizes, "sha256": sums}, indent=1))
    _flush(marker)
    _flush(partial)
    _take_name(partial, path)


def is_complete(path: Path) -> bool:
    """Whether `path` is a file, or a folder whose marker is there and agrees with the sizes of all its files.

    A marker that names anything but files of its own folder is none.
    """
    if not path.is_dir():
        return path.is_file()
    try:
        sizes = json.loads((path / MARKER).read_text())["files"]
        return all(
            Path(name).name == name and (path / name).is_file() and (path / name).stat().st_size == size
            for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def files_in(path: Path) -> list[str]:
    """Names of the files that a complete folder's marker lists, sorted."""
    return sorted(json.loads((path / MARKER).read_text())["files"])


def checksums_of(path: Path) -> dict[str, str]:
    """Checksums that a folder's marker gives, by file; none if there is no marker, or one of the first format,
    which had sizes only.

    Raises:
        DamagedFileError: A marker is there but cannot be read, or does not list sizes and checksums of the same files.
            It could not protect them, so nothing is taken from the folder.
    """
    marker = path / MARKER
    if not marker.exists() and not marker.is_symlink():
        return {}
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        sizes = found["files"]
        sums = found["sha256"] if "sha256" in found else dict.fromkeys(sizes, "")
        agree = (
            len(sizes) > 0
            and sizes.keys() == sums.keys()
            and all(type(size) is int and size >= 0 for size in sizes.values())
            and all(isinstance(value, str) for value in sums.values())
        )
        if not agree:
            raise ValueError("sizes and checksums are not those of one list of files")
    except KeyError as error:
        reason = f"it has no key {error}"
    except (TypeError, AttributeError, RecursionError):
        reason = "it holds other things than sizes and checksums of files"
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        return dict(sums) if "sha256" in found else {}
    raise DamagedFileError(
        f"{marker}: cannot be used ({reason}); without its checksums the files beside it cannot be trusted. Copy the "
        f"folder again, or delete {MARKER} to read the files unchecked"
    )


def require_intact(path: Path, names: Iterable[str]) -> None:
    """Read files of a folder once and compare them with its marker's checksums, if it has a marker.

    Raises:
        DamagedFileError: A file is not the one that was written, the marker does not list it, or the marker itself
            cannot be used; the message names it.
    """
    sums = checksums_of(path)
    if not sums:
        return
    for name in names:
        if name not in sums:
            if (path / name).exists():
                raise DamagedFileError(
                    f"{path / name}: {MARKER} does not list it, so it is none of the files that were written together; "
                    f"remove the file, or delete {MARKER} to read the folder unchecked"
                )
        elif sha256_of(path / name) != sums[name]:
            raise DamagedFileError(
                f"{path / name}: its content is not what was written (its SHA-256 differs from the one in {MARKER}); "
                "the disk or a copy has damaged it"
            )


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


def leftovers(directory: Path) -> list[Path]:
    """What is in a directory and not complete, or has been left by a kill and waits for no name. Renames nothing."""
    taken = set(whole_names(directory).values())
    return sorted(
        path
        for path in directory.glob("*")
        if path not in taken and (_LEFTOVER.match(path.name) or not is_complete(path))
    )


def complete_beside(path: Path) -> list[str]:
    """Names of what else is complete beside `path` and ends alike: what comes before it by name, the last one first.

    Everything else, if nothing comes before it. Names with a number of fixed width order as the numbers do.
    """
    names = [name for name in whole_names(path.parent) if Path(name).suffix == path.suffix]
    others = sorted((name for name in names if name != plain_name(path).name), reverse=True)
    return [name for name in others if name < path.name] or others


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


def default_cache_dir() -> Path:
    """The folder for caches when none is given.

    Returns:
        ``$DSV41_CACHE`` if set, else ``$XDG_CACHE_HOME/dsv41``, else ``~/.cache/dsv41``. It need not exist.

    Raises:
        RuntimeError: The folder is meant to lie in a home directory that cannot be found.
    """
    if own := os.environ.get("DSV41_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "dsv41"
    return Path.home() / ".cache" / "dsv41"
