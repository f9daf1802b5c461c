"""Lightning's private names that this package relies on, each behind one function.

Lightning has no public way to ask these questions. Every other file of the package asks here, so that a new release of
Lightning is checked against this file alone; a test keeps it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor


def inside_accumulation(trainer: L.Trainer) -> bool:
    """Whether the batch that has just ended leaves gradients of an optimizer step that is not finished."""
    return trainer.fit_loop._should_accumulate()


def logs_this_step(trainer: L.Trainer) -> bool:
    """Whether Lightning logs the step under way (``trainer.log_every_n_steps``)."""
    return trainer._logger_connector.should_update_logs


def log_to_loggers(trainer: L.Trainer, metrics: Mapping[str, Tensor], step: int | None = None) -> None:
    """Log numbers at once, past ``LightningModule.log``: nothing is kept, repeated, reduced or shown on the bar.

    Args:
        trainer: The trainer.
        metrics: Scalars of all ranks, by name.
        step: Their step; None takes `logged_step`.
    """
    trainer._logger_connector.log_metrics(dict(metrics), step=step)


def logged_step(trainer: L.Trainer) -> int:
    """Step number under which Lightning logs the scalars of now: optimizer steps before the one under way."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def align_logged_step(trainer: L.Trainer) -> None:
    """Set the logged step number to the optimizer steps done.

    Lightning counts the two apart, and a checkpoint may have been written between one and the other: the curves of a
    resumed run would be a step off, for good. Call it where a batch begins.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether Lightning is about to validate after the batch that has just ended."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and loop._should_check_val_fx(fetcher) and not loop.val_loop.skip


def validate_after_each_batch(trainer: L.Trainer) -> dict[str, Any]:
    """Set the validation intervals to one batch; returns the trainer's attributes before, by name."""
    intervals: dict[str, Any] = {
        "val_check_batch": 1,
        "check_val_every_n_epoch": None,
        "_val_check_time_interval": None,
    }
    before = {name: getattr(trainer, name) for name in intervals}
    for name, value in intervals.items():
        setattr(trainer, name, value)
    return before


def compute_dtype_of_plugin(trainer: L.Trainer) -> torch.dtype:
    """Dtype of the matrix products that the trainer's precision plugin asks for."""
    return _plugin_to_compute_dtype(trainer.precision_plugin)


class _OnlyWhatIsAskedFor(_CheckpointConnector):
    """Lightning's connector, without the checkpoint that it looks for under SLURM when none is named."""

    @property
    def _hpc_resume_path(self) -> str | None:
        return None


def load_only_what_is_asked_for(trainer: L.Trainer) -> None:
    """Keep the trainer from loading ``hpc_ckpt_N.ckpt`` of the working directory, whichever run left it there."""
    trainer._checkpoint_connector.__class__ = _OnlyWhatIsAskedFor


def share_version(trainer: L.Trainer) -> None:
    """Let the file loggers of a list that write into the same directory as the first have its run's number.

    Each would take the next free one when it begins, and the second finds the first one's taken.
    """
    files = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger | CSVLogger)]
    if len(files) < 2 or files[0] is not trainer.loggers[0]:
        return
    for logger in files[1:]:
        if logger.root_dir == files[0].root_dir and logger._version is None:
            logger._version = files[0].version


def log_step_now(trainer: L.Trainer) -> None:
    """Log the step that has just ended, if it is due, and leave to Lightning what is logged after this.

    Lightning logs a step after the callbacks' `on_train_batch_end`, where checkpoints are written: a run killed in
    between would be resumed behind a step that no curve has, and that no resumed run makes again. Called by all ranks
    in `on_train_batch_end`, where no gradients are pending.
    """
    connector: Any = trainer._logger_connector
    _forget(connector)
    connector.update_train_step_metrics()
    if not (connector.should_update_logs or getattr(trainer, "fast_dev_run", False)):
        return
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    logged = set(connector.metrics["log"])

    def log_the_rest() -> None:
        # In Lightning's place, once: a number that is logged twice would be two points of a curve.
        _forget(connector)
        rest = {name: value for name, value in connector.metrics["log"].items() if name not in logged}
        connector.log_metrics(rest, step=step)

    connector.update_train_step_metrics = log_the_rest


def forget_logged_step(trainer: L.Trainer) -> None:
    """Let Lightning log as usual; a run that failed between both may have left a step half-way."""
    _forget(trainer._logger_connector)


def _forget(connector: Any) -> None:
    vars(connector).pop("update_train_step_metrics", None)
