"""CSV logger of a resumed run: Lightning's own deletes the ``metrics.csv`` that it finds."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger

from dsv41.files import written_whole

_ASIDE = "metrics.csv.resuming"


class ResumedCSVLogger(CSVLogger):
    """CSVLogger that appends to the ``metrics.csv`` of the run that it resumes.

    The history waits under another name while Lightning clears the directory, so a kill in between loses nothing.

    Args:
        *args: As `CSVLogger`.
        resume_step: Optimizer steps of the checkpoint; rows of this step and later ones are superseded and left out.
            None keeps all.
        **kwargs: As `CSVLogger`.
    """

    def __init__(self, *args: Any, resume_step: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resume_step = resume_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer; made at first use, with the history in place."""
        if self._experiment is not None:
            return self._experiment
        file, aside = Path(self.log_dir) / "metrics.csv", Path(self.log_dir) / _ASIDE
        if file.is_file() and not aside.is_file():
            file.rename(aside)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
            writer = super().experiment
        if aside.is_file():
            writer.metrics_keys = self._restore(aside, file)
            aside.unlink()
        return writer

    def _restore(self, aside: Path, file: Path) -> list[str]:
        """Write the rows that still hold, and return the columns."""
        with aside.open(newline="") as history:
            reader = csv.DictReader(history)
            rows = [row for row in reader if self._holds(row)]
            columns = list(reader.fieldnames or [])
        with written_whole(file) as partial, partial.open("w", newline="") as new:
            out = csv.DictWriter(new, fieldnames=columns)
            out.writeheader()
            out.writerows(rows)
        return columns

    def _holds(self, row: dict[str, str]) -> bool:
        step = row.get("step") or ""
        return self.resume_step is None or not step.isdecimal() or int(step) < self.resume_step
