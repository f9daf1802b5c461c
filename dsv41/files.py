"""Files and folders that appear whole or not at all, and the folder for caches.

A file or folder is written under another name in the same directory, ``NAME.<32 hex digits>.partial``, and renamed when
complete. A folder's marker, written last, lists its files with their sizes and checksums. Before deletion a path is
renamed (``.deleted``), so that half of it is never mistaken for the whole.
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
# Full disk, exhausted quota, limit on the size of a file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedFileError(ValueError):
    """Checksum of a file that differs from the recorded one."""


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{uuid4().hex}.{kind}")


def _flush(path: Path) -> None:
    """Flush a file, or a directory's names, to the disk: a power cut could leave a new name without content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file atomically: other processes see either nothing or all of it.

    The file is written under another name in the same folder, flushed to the disk and renamed. When two processes write
    the same file at once, the last one wins, so both should write the same content. If the block raises, nothing is
    left; a killed process leaves a file that ends in ``.partial``.

    Args:
        path: Final path of the file. Its folder is created if needed.

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
    """OSError behind `error`: a full disk becomes a RuntimeError inside torch's zip writer."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def unwritten(path: Path, reason: str, code: int | None, needed: int = 0) -> OSError:
    """Error of a failed write: path, reason, free space, and that nothing is lost.

    Args:
        path: File or folder to be written.
        reason: Reason of the failure.
        code: `errno` of the failure, if known; free space is reported where it matters.
        needed: Approximate size of `path` in bytes, if known.
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
    """Raise `unwritten` for failures of the disk in the block; the arguments are those of `unwritten`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise unwritten(path, cause.strerror or str(cause), cause.errno, needed) from error


def _take_name(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`, replacing an existing one.

    A file takes a file's place in one step. Where a folder is involved, a kill between the two renames leaves no
    `path`, but a whole folder that waits for the name: see `settle`.
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
    """Create and return the folder that becomes `path` once it is complete."""
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
    """Mark a folder as complete and rename it to `path`, replacing an existing one.

    Args:
        partial: From `begin_folder`, its files written and flushed.
        path: Final path.
        about: Plain values to store in the marker.
        checksums: `sha256_of` of files, where the writer has computed it; the others are read once more.
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

    A marker that names files outside its folder is invalid.
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
            Such a marker protects nothing, so the folder is not read.
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
    """Delete a file or a folder; a missing one is no error. A kill in the middle leaves no half of it."""
    if path.is_dir():
        deleted = _beside(path, "deleted")
        path.rename(deleted)
        shutil.rmtree(deleted)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Remove a file or folder that is no longer needed, like `remove_whole`; a failure does not end the run."""
    try:
        remove_whole(path)
    except OSError as error:
        logger.warning("could not delete %s: %s", path, error)


def _waits_for_its_name(path: Path, kind: str) -> bool:
    # A replaced path was whole; of partial ones, only a folder has a marker that shows it.
    return (kind == "replaced" or (kind == "partial" and path.is_dir())) and is_complete(path)


def whole_names(directory: Path) -> dict[str, Path]:
    """Complete files and folders of a directory, by name. Renames nothing, so a run may write there meanwhile.

    Returns:
        Paths by name; where a kill during publication left no path of that name, the newest one waiting for it.
    """
    waiting: dict[str, Path] = {}
    # "partial" before "replaced": the newer of two that wait for the same name.
    for path in sorted(directory.glob("*.*"), key=lambda path: path.suffix):
        match = _LEFTOVER.match(path.name)
        if match and _waits_for_its_name(path, match["kind"]):
            waiting.setdefault(match["name"], path)
    # Names second: a path published in between is found either waiting or under its name.
    named = {path.name: path for path in directory.glob("*") if not _LEFTOVER.match(path.name) and is_complete(path)}
    return waiting | named


def leftovers(directory: Path) -> list[Path]:
    """Incomplete paths of a directory, and remains of a kill that wait for no name. Renames nothing."""
    taken = set(whole_names(directory).values())
    return sorted(
        path
        for path in directory.glob("*")
        if path not in taken and (_LEFTOVER.match(path.name) or not is_complete(path))
    )


def complete_beside(path: Path) -> list[str]:
    """Names of complete paths beside `path` with the same suffix: those before it by name, the last one first.

    All others, if none comes before it. Names with a number of fixed width order as the numbers do.
    """
    names = [name for name in whole_names(path.parent) if Path(name).suffix == path.suffix]
    others = sorted((name for name in names if name != plain_name(path).name), reverse=True)
    return [name for name in others if name < path.name] or others


def plain_name(path: Path) -> Path:
    """Name that a path of `whole_names` has or waits for."""
    match = _LEFTOVER.match(path.name)
    return path.with_name(match["name"]) if match else path


def settle(directory: Path) -> list[str]:
    """Tidy a directory after kills: complete paths get their names, others are deleted. For the only writer there.

    Returns:
        Names of deleted paths.
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
    """Default folder for caches.

    Returns:
        ``$DSV41_CACHE`` if set, else ``$XDG_CACHE_HOME/dsv41``, else ``~/.cache/dsv41``. It need not exist.

    Raises:
        RuntimeError: The home directory is needed and cannot be found.
    """
    if own := os.environ.get("DSV41_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "dsv41"
    return Path.home() / ".cache" / "dsv41"
