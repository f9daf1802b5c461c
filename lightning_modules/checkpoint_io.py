"""Checkpoints that appear complete or not at all, read on one device whatever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_modules.files import remove_whole, written_whole
from lightning_modules.sharded_checkpoint import read_whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, then renames. Also opens the sharded checkpoints of many ranks.

    Lightning's own way goes through the system's temporary directory; where that is another file system, the last move
    is a copy, and a kill during it leaves half a file under the final name. This one also streams instead of holding a
    second copy of the checkpoint in memory. A leftover of a killed save ends in ``.partial``, is never loaded, and goes
    when a run writes to that directory again.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            TypeError: `storage_options` is given.
            OSError: The disk is full or not writable; an older file of that name is untouched.
        """
        if storage_options is not None:
            raise TypeError("storage_options: not supported by AtomicCheckpointIO")
        # An open file, not its path, which torch would write into the archive.
        with written_whole(Path(path)) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file, or assemble a sharded checkpoint in memory."""
        if Path(path).is_dir():
            return read_whole(Path(path))
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file or a folder; a kill in the middle leaves nothing that looks like a checkpoint."""
        remove_whole(Path(path))
