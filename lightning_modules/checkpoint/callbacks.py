"""The newest checkpoint, to go on from, and the best one, to use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from dsv41.files import discard, leftovers, plain_name, settle, whole_names
from lightning_modules.callbacks.step_numbers import forget_logged_step, log_step_now

BEST_NAME = "best"
_STEP_FILE = re.compile(r"^step-(\d+)\.ckpt$")
_RUN_FOLDER = re.compile(r"^version_(\d+)$")


class LatestCheckpoint(ModelCheckpoint):
    """Saves every `every_n_steps` optimizer steps and at the end as ``step-00000100.ckpt``; the newest ones are kept.

    It is a file, or under `EngramFSDPStrategy` a folder with a file per rank. An older one goes only after the newer
    one is complete, so a kill at any time leaves one to resume from; what a killed save has left goes when the run that
    writes there is continued. Nothing is saved inside a gradient accumulation: the gradients of its first part are in
    no checkpoint. Where a validation is due after the same step, the file is written when it is done, so that a resumed
    run does not skip it. Loggers get a step's numbers before its checkpoint gets its name.

    Args:
        every_n_steps: Optimizer steps between saves, at least 1.
        keep: How many of the newest to keep, at least 1; -1 keeps all.
    """

    def __init__(self, every_n_steps: int = 200, keep: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps: must be at least 1, got {every_n_steps}")
        if keep < 1 and keep != -1:
            raise ValueError(f"keep: must be at least 1, or -1 for all, got {keep}")
        # Lightning removes only the single previous file of an unmonitored checkpoint; the rest is done here.
        super().__init__(
            filename="step-{step:08d}",
            auto_insert_metric_name=False,
            every_n_train_steps=every_n_steps,
            save_top_k=-1,
            enable_version_counter=False,
        )
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._due_after_validation = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clear what killed saves of an earlier run have left."""
        folder = Path(self.dirpath) if self.dirpath else None
        if trainer.is_global_zero and folder is not None and folder.is_dir():
            left = settle(folder)
            if left:
                rank_zero_info(f"removed what unfinished saves had left in {folder}: {', '.join(left)}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with no step half logged."""
        forget_logged_step(trainer)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Save if this batch ended an optimizer step at which a save is due."""
        if trainer.fit_loop._should_accumulate():
            return
        if trainer.global_step % self.every_n_steps and not ends_with_this_batch(trainer):
            return
        if _validation_follows(trainer):
            self._due_after_validation = True
        else:
            log_step_now(trainer)
            self._save_once(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what waited for the validation."""
        if self._due_after_validation and not trainer.sanity_checking:
            self._save_once(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a run whose end was not to be seen at its last batch (it was stopped by a validation, say).

        The curves of a run resumed from here are one step off: Lightning has already counted the step as logged.
        """
        if not trainer.fit_loop._should_accumulate():
            self._save_once(trainer)

    def _save_once(self, trainer: L.Trainer) -> None:
        self._due_after_validation = False
        if trainer.global_step == self._last_global_step_saved or self._should_skip_saving_checkpoint(trainer):
            return
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self.keep != -1 and trainer.is_global_zero:
            for old in steps_in(Path(filepath).parent)[: -self.keep]:
                discard(old)


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint with the lowest validation loss as ``best.ckpt``."""

    def __init__(self) -> None:
        super().__init__(filename=BEST_NAME, monitor="val/loss", save_top_k=1, enable_version_counter=False)


def ends_with_this_batch(trainer: L.Trainer) -> bool:
    """Whether the batch that has just ended is the last of the run."""
    last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
    return (
        trainer.global_step == trainer.max_steps
        or trainer.should_stop
        or (last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
    )


def _validation_follows(trainer: L.Trainer) -> bool:
    """Whether Lightning is about to validate after the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher) and not loop.val_loop.skip


def steps_in(folder: Path) -> list[Path]:
    """Complete checkpoints of `LatestCheckpoint` in `folder`, oldest step first."""
    found = [(int(match[1]), path) for name, path in whole_names(folder).items() if (match := _STEP_FILE.match(name))]
    return [path for _, path in sorted(found)]


def run_number(folder: Path) -> int | None:
    """N of a run directory ``version_N`` as TensorBoardLogger names it, or None."""
    match = _RUN_FOLDER.match(folder.name)
    return int(match[1]) if match else None


def _runs(runs: Path) -> list[Path]:
    """Directories of checkpoints, the newest run first."""
    numbered = [(number, path) for path in runs.glob("*") if (number := run_number(path)) is not None]
    return [run / "checkpoints" for _, run in sorted(numbered, reverse=True)]


def _found_in(folder: Path, name: str) -> Path | None:
    if name == BEST_NAME:
        return whole_names(folder).get(f"{BEST_NAME}.ckpt")
    steps = steps_in(folder)
    return steps[-1] if steps else None


def find_checkpoint(runs: Path, name: str) -> Path | None:
    """Resolve "last" or "best" among the runs of one experiment.

    Args:
        runs: Directory with ``version_0``, ``version_1``, ...
        name: "last" is the newest step of the newest run that has any checkpoint; "best" is its best one.

    Checkpoints that are not complete do not count; one that is, but did not get its name before a kill, does.

    Returns:
        The file or folder, or None.
    """
    return next((found for folder in _runs(runs) if (found := _found_in(folder, name))), None)


def passed_over(runs: Path, name: str) -> list[Path]:
    """What `find_checkpoint` has seen and not taken: incomplete checkpoints, and what kills have left of others."""
    seen: list[Path] = []
    for folder in _runs(runs):
        kind = re.compile(rf"^{BEST_NAME}\.ckpt$") if name == BEST_NAME else _STEP_FILE
        seen += [path for path in leftovers(folder) if kind.match(plain_name(path).name)]
        if _found_in(folder, name):
            break
    return seen
