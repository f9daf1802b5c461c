"""The newest checkpoint, to go on from, and the best one, to use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

BEST_NAME = "best"
_STEP_FILE = re.compile(r"^step-(\d+)\.ckpt$")


class LatestCheckpoint(ModelCheckpoint):
    """Saves every `every_n_steps` optimizer steps and at the end as ``step-00000100.ckpt``; the newest ones are kept.

    An older file goes only after the newer one is complete, so a kill at any time leaves one to resume from.

    Args:
        every_n_steps: Optimizer steps between saves, at least 1.
        keep: How many of the newest to keep, at least 1; -1 keeps all.
        dirpath: Folder; None is ``checkpoints`` in the logger's directory.
    """

    def __init__(self, every_n_steps: int = 200, keep: int = 1, dirpath: str | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps: must be at least 1, got {every_n_steps}")
        if keep < 1 and keep != -1:
            raise ValueError(f"keep: must be at least 1, or -1 for all, got {keep}")
        # Lightning removes only the single previous file of an unmonitored checkpoint, so `keep` beyond that is done
        # here.
        super().__init__(
            dirpath=dirpath,
            filename="step-{step:08d}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_steps,
            save_top_k=-1,
            enable_version_counter=False,
        )
        self.keep = keep

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self.keep == -1:
            return
        for old in steps_in(Path(filepath).parent)[: -self.keep]:
            trainer.strategy.remove_checkpoint(old)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Save the last step too, whatever the interval.

        Here rather than when training ends, because by then Lightning has counted the unfinished epoch as done.
        """
        super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.global_step == trainer.max_steps:
            self._save_once(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a run that ends by epochs or time."""
        super().on_train_end(trainer, pl_module)
        self._save_once(trainer)

    def _save_once(self, trainer: L.Trainer) -> None:
        if trainer.global_step != self._last_global_step_saved and not getattr(trainer, "fast_dev_run", False):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint with the lowest validation loss as ``best.ckpt``.

    Args:
        dirpath: Folder; None is ``checkpoints`` in the logger's directory.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(
            dirpath=dirpath, filename=BEST_NAME, monitor="val/loss", save_top_k=1, enable_version_counter=False
        )


def steps_in(folder: Path) -> list[Path]:
    """Complete checkpoints of `LatestCheckpoint` in `folder`, oldest step first."""
    found = [(int(match[1]), path) for path in folder.glob("*.ckpt") if (match := _STEP_FILE.match(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(runs: Path, name: str) -> Path | None:
    """Resolve "last" or "best" among the runs of one experiment.

    Args:
        runs: Directory with ``version_0``, ``version_1``, ... as TensorBoardLogger makes them.
        name: "last" is the newest step of the newest run that has any checkpoint; "best" is its best one.

    Returns:
        The file, or None.
    """
    versions = [(int(path.name.removeprefix("version_")), path) for path in runs.glob("version_*") if path.is_dir()]
    for _, version in sorted(versions, reverse=True):
        folder = version / "checkpoints"
        if name == BEST_NAME:
            best = folder / f"{BEST_NAME}.ckpt"
            if best.is_file():
                return best
        elif steps := steps_in(folder):
            return steps[-1]
    return None
