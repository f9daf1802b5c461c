"""Checkpoints that appear complete or not at all, read on one device whatever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from dsv41.files import remove_whole, write_failures_explained, written_whole
from lightning_modules.checkpoint.safe_load import read_plain, require_sound
from lightning_modules.checkpoint.sharded import read_whole, size_of
from lightning_modules.checkpoint.structure import require_structure


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, then renames. Also opens the sharded checkpoints of many ranks.

    Lightning's own way goes through the system's temporary directory; where that is another file system, the last move
    is a copy, and a kill during it leaves half a file under the final name. This one also streams instead of holding a
    second copy of the checkpoint in memory. A leftover of a killed save ends in ``.partial``, is never loaded, and goes
    when a run writes to that directory again.

    Args:
        optimizers: False leaves the optimizers' states on the disk, where a run only evaluates.
    """

    def __init__(self, optimizers: bool = True) -> None:
        super().__init__()
        self.optimizers = optimizers

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            TypeError: `storage_options` is given.
            OSError: The disk is full or not writable; an older file of that name is untouched, and nothing is left of
                the new one.
        """
        if storage_options is not None:
            raise TypeError("storage_options: not supported by AtomicCheckpointIO")
        path = Path(path)
        # An open file, not its path, which torch would write into the archive.
        with (
            write_failures_explained(path, size_of(checkpoint)),
            written_whole(path) as partial,
            partial.open("wb") as file,
        ):
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, or assemble a sharded checkpoint in memory, after comparing all of it with its checksums.

        Only plain values and tensors are read, whatever `weights_only` says.

        Raises:
            FileNotFoundError: There is none.
            DamagedFileError: It is cut or a bit has changed; the message names the file and what could be loaded
                instead.
            ValueError: It is not complete, or holds anything else, or a part is missing or of another kind.
        """
        path = Path(path)
        if path.is_dir():
            checkpoint = read_whole(path, self.optimizers)
        else:
            require_sound(path)
            checkpoint = read_plain(path, mmap=not self.optimizers, map_location=map_location)
        require_structure(path, checkpoint, self.optimizers)
        if not self.optimizers:
            checkpoint.pop("optimizer_states", None)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a file or a folder; a kill in the middle leaves nothing that looks like a checkpoint."""
        remove_whole(Path(path))
