"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


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
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            # Or a power cut after the rename could leave the new name with nothing in it.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
