"""The numbers of a step, given to the loggers before its checkpoint gets its name.

Lightning logs a step after the callbacks' `on_train_batch_end`, where checkpoints are written. A run killed in between
would be resumed behind a step that no curve has, and that no resumed run makes again.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L


def log_step_now(trainer: L.Trainer) -> None:
    """Log the step that has just ended, if it is due, and leave to Lightning what is logged after this.

    Called by all ranks in `on_train_batch_end`, where no gradients are pending.
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
