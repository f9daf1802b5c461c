"""Where caches lie and how files get there whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


def default_cache_dir() -> Path:
    """The folder for caches when none is given.

    Returns:
        ``$DSV41_CACHE`` if set, else ``$XDG_CACHE_HOME/dsv41``, else ``~/.cache/dsv41``. It need not exist.
    """
    if own := os.environ.get("DSV41_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "dsv41"
    return Path.home() / ".cache" / "dsv41"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write a file so that other processes see either nothing or all of it.

    The file is written under another name in the same folder and renamed at the end. When two processes write the same
    file at once, the last one wins, so both should write the same content. If the block raises, nothing is left.

    Args:
        path: Where the file is to appear. Its folder is made if needed.

    Yields:
        The path to write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
