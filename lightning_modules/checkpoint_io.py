"""Checkpoint files that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_modules.files import written_whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, then renames.

    Lightning's own way goes through the system's temporary directory; where that is another file system, the last move
    is a copy, and a kill during it leaves half a file under the final name. This one also streams instead of holding a
    second copy of the checkpoint in memory. A leftover of a killed save ends in ``.partial`` and is never loaded.
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
