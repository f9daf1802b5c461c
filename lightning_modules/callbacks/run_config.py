"""Configuration and tokenizer of a run, saved in its directory; and no directory where a run was refused."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_modules.checkpoint.find import CONFIG, run_name
from lightning_modules.checkpoint.run_directory import run_directory

TOKENIZER = "tokenizer"
# Files of a run's directory that are written before its first step.
_BEFORE_TRAINING = ("events.out.tfevents.*", "hparams.yaml", "metrics.csv", CONFIG)


class SaveRunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` and the tokenizer in the directory of a new run of fit; a resumed one has them already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directory: Path | None = None
        self._existing: Path | None = None
        self._training = False
        self._made = time.time()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save, unless the directory has a configuration."""
        if stage != "fit" or self.already_saved:
            return
        directory = run_directory(trainer)  # asked for by all ranks, since the answer is rank 0's
        file = directory / CONFIG
        if trainer.strategy.broadcast(file.is_file()):
            self._existing = directory
            return
        self._directory = directory
        if trainer.is_global_zero:
            directory.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, file, skip_none=False, overwrite=self.overwrite, multifile=self.multifile)
            # The model cannot be used with another tokenizer, and training it again needs the same text.
            tokenizer = getattr(pl_module, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory / TOKENIZER)
        self.already_saved = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse to write into another run; only here does a Trainer say from Python that it resumes.

        Raises:
            FileExistsError: The directory holds a run, and no checkpoint was given.
        """
        if self._existing is not None and not self.already_saved and trainer.ckpt_path is None:
            raise FileExistsError(
                f"trainer.logger: {self._existing} holds a run already; resume it with --ckpt_path last, or give "
                "another version (without a logger, another trainer.default_root_dir)"
            )

    def on_train_batch_start(self, *_args: Any, **_kwargs: Any) -> None:
        """Note that the run has begun, and is to be kept."""
        self._training = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove the directory of a run that was refused before its first step."""
        if self._training or not trainer.is_global_zero or not trainer.loggers:
            return
        first = trainer.loggers[0]
        if not isinstance(first, TensorBoardLogger | CSVLogger):
            return  # the directory is a service's
        directory = Path(first.root_dir) / run_name(first.version)
        if self._directory is None and (directory / CONFIG).is_file():
            return  # a run that was to be resumed
        if directory.is_dir() and all(self._is_new(file, directory) for file in directory.rglob("*")):
            shutil.rmtree(directory, ignore_errors=True)

    def _is_new(self, path: Path, directory: Path) -> bool:
        """Whether `path` is a folder, or a file that this process writes before the first step."""
        known = path.relative_to(directory).parts[0] == TOKENIZER or any(map(path.match, _BEFORE_TRAINING))
        return path.is_dir() or (known and path.stat().st_mtime >= self._made - 1)
