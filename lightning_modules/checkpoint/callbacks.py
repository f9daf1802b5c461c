"""Callbacks that write the newest checkpoint, to resume from, and the best one, to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from dsv41.files import discard, settle
from lightning_modules.checkpoint.find import BEST_NAME, runs_in, search, steps_in
from lightning_modules.checkpoint.run_directory import run_directory
from lightning_modules.training.lightning_private import (
    forget_logged_step,
    inside_accumulation,
    log_step_now,
    validation_follows,
)


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
        if inside_accumulation(trainer):
            return
        if trainer.global_step % self.every_n_steps and not ends_with_this_batch(trainer):
            return
        if validation_follows(trainer):
            self._due_after_validation = True
        else:
            log_step_now(trainer)
            self._save_once(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what waited for the validation."""
        if self._due_after_validation and not trainer.sanity_checking:
            self._save_once(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a run whose end was not to be seen at its last batch (it was stopped by a validation, say)."""
        if not inside_accumulation(trainer):
            self._save_once(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save what waited for a validation in which another callback has failed; one of several ranks may be alone."""
        if self._due_after_validation and trainer.world_size == 1:
            self._save_once(trainer)

    def _save_once(self, trainer: L.Trainer) -> None:
        self._due_after_validation = False
        if trainer.global_step == self._last_global_step_saved or self._should_skip_saving_checkpoint(trainer):
            return
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Answer ``trainer.fit(..., ckpt_path="last")`` from Python: the newest step of the trainer's own run, or of
        the newest run beside it, from which a new one is started.

        Raises:
            FileNotFoundError: There is none; Lightning would start anew.
        """
        run = run_directory(trainer)
        found = search([run], "last").path
        if found is None and trainer.loggers:
            found = search(runs_in(run.parent), "last").path
        if found is None:
            raise FileNotFoundError(f"ckpt_path: no 'last' checkpoint in {run} or beside it; leave it out to start")
        return {str(found)}

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
