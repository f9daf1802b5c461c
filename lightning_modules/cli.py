"""The command line: ``dsv41 fit | validate | test | predict``, LightningCLI with this project's parts filled in.

Rules beyond LightningCLI's own:
- The tokenizer and every size that follows from it come from the data module; they are not typed twice.
- A checkpoint never overrides the command line (see `checkpoint_rule`). Lightning's default does, for single files.
- ``--ckpt_path last`` is the newest step of the newest run of this experiment, ``best`` its best one. A run resumed
  from ``last`` writes on into the same directory, so that its curves stay one curve.
- validate, test and predict without --config take the ``config.yaml`` saved beside the checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from dsv41.config import DeepseekV41TextConfig
from lightning_modules.callbacks import BestCheckpoint, LatestCheckpoint, PartSummary, TokenThroughput, UnigramBaseline
from lightning_modules.callbacks.checkpoint import find_checkpoint
from lightning_modules.checkpoint_io import AtomicCheckpointIO
from lightning_modules.data import TextDataModule
from lightning_modules.task import DeepseekV41Task

# A text configuration is a group of options, not a class to choose.
set_parsing_settings(subclasses_disabled=[DeepseekV41TextConfig])

# Warnings of Lightning about what is meant to be so.
_EXPECTED = (
    ".*does not have many workers",  # rows are memory-mapped
    ".*is smaller than the logging interval",  # the task lowers the interval
    "Checkpoint directory .* exists and is not empty",  # a resumed run goes on where it was
    "The dirpath has changed",  # validate and test have a log directory of their own
    ".*with Trainer configured with multiple `ModelCheckpoint` callbacks",  # the best one stands first
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # Lightning's own code on the newest torch
)


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration in the run's directory; a resumed run does not touch the one that is there."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Save once per new run of fit."""
        if stage != "fit" or trainer.log_dir is None or (Path(trainer.log_dir) / self.config_filename).is_file():
            return
        super().setup(trainer, pl_module, stage)


class DeepseekV41CLI(LightningCLI):
    """LightningCLI around `DeepseekV41Task` and `TextDataModule`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the checkpoint options and link the tokenizer."""
        # The best one first: Lightning resolves ckpt_path="best" through the first checkpoint callback.
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(LatestCheckpoint, "checkpoint")
        parser.link_arguments("data", "model.tokenizer", compute_fn=_tokenizer_of, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """LightningCLI's without its warning about arguments given from Python, which is how notebooks call it."""
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the parts that are no configuration: how files are written, and a progress bar that survives logs."""
        config = self._get(self.config_init, "trainer", default={})
        plugins = config.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, AtomicCheckpointIO()]
        callbacks = config.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            kwargs["callbacks"] = [*callbacks, TQDMProgressBar(refresh_rate=5)]
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Not LightningCLI's: stored hyper-parameters do not override the command line."""

    def before_instantiate_classes(self) -> None:
        """Require a configuration and resolve ``--ckpt_path``, before anything is built."""
        if self.subcommand is None:
            return
        config = self.config[self.subcommand]
        if not config.get("config") and config.model.config.hidden_size == 5120:
            raise ValueError(
                "config: no --config given, which would build the released model of 748 billion parameters; "
                "start with --config configs/tiny.yaml"
            )
        name = config.get("ckpt_path")
        if name in ("last", "best"):
            config.ckpt_path = str(self._resolve(config, name))
        elif name is not None and not Path(name).exists():
            raise FileNotFoundError(f"ckpt_path: {name} does not exist")

    def _resolve(self, config: Any, name: str) -> Path:
        logger = config.trainer.logger
        init = getattr(logger, "init_args", None)
        if init is None or "save_dir" not in init:
            raise ValueError(f"ckpt_path: {name!r} needs trainer.logger with a save_dir, or give the file's path")
        runs = Path(init.save_dir) / init.name
        path = find_checkpoint(runs, name)
        if path is None:
            raise FileNotFoundError(f"ckpt_path: no {name!r} checkpoint under {runs}; leave --ckpt_path out to start")
        if self.subcommand == "fit":
            init.version = int(path.parent.parent.name.removeprefix("version_"))
            if name == "last":
                # What the killed run logged after its checkpoint is superseded.
                step = int(path.stem.removeprefix("step-"))
                logger.dict_kwargs = (logger.get("dict_kwargs") or {}) | {"purge_step": step}
        print(f"ckpt_path: {name} is {path}", file=sys.stderr)
        return path


def _tokenizer_of(data: TextDataModule) -> Any:
    return data.fast_tokenizer


def _with_saved_config(args: list[str]) -> list[str]:
    """For a subcommand that only reads a checkpoint, put the run's saved configuration before the other options."""
    if not args or args[0] not in ("validate", "test", "predict"):
        return args
    if any(arg in ("-c", "--config") or arg.startswith("--config=") for arg in args):
        return args
    for index, arg in enumerate(args):
        path = arg.removeprefix("--ckpt_path=") if arg.startswith("--ckpt_path=") else None
        if arg == "--ckpt_path" and index + 1 < len(args):
            path = args[index + 1]
        if path and (saved := Path(path).parent.parent / "config.yaml").is_file():
            return [args[0], "--config", str(saved), *args[1:]]
    return args


def get_cli(args: ArgsType = None, run: bool = True) -> DeepseekV41CLI:
    """Build the command line's objects, and with `run` execute the subcommand.

    Args:
        args: Arguments as a list of strings or a dict; None takes ``sys.argv``. With ``run=False`` there is no
            subcommand: ``get_cli(["--config", "configs/tiny.yaml"], run=False)``.
        run: Execute. False leaves `cli.model`, `cli.datamodule` and `cli.trainer` to the caller (notebooks, tests).
    """
    for message in _EXPECTED:
        warnings.filterwarnings("ignore", message)
    return DeepseekV41CLI(
        DeepseekV41Task,
        TextDataModule,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={
            "callbacks": [LearningRateMonitor("step"), TokenThroughput(), UnigramBaseline(), PartSummary()],
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        },
        parser_kwargs={"prog": "dsv41", "description": "Train and evaluate DeepSeek-V4.1 models."} if run else None,
        args=args,
        run=run,
    )


def main(args: list[str] | None = None) -> None:
    """Console script. Bad input ends with one line on stderr and exit status 1.

    ``DSV41_TRACEBACK=1`` shows where it was found. An error inside the training loop always has its traceback.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "litlogger" not in record.msg)
    try:
        get_cli(_with_saved_config(sys.argv[1:] if args is None else args))
    except (ValueError, FileNotFoundError) as error:
        running = any(frame.name == "advance" for frame in traceback.extract_tb(error.__traceback__))
        if running or os.environ.get("DSV41_TRACEBACK"):
            raise
        print(f"dsv41: error: {error}", file=sys.stderr)
        sys.exit(1)
