"""The command line: ``dsv41 fit | validate | test | predict``, LightningCLI with this project's parts filled in.

Rules beyond LightningCLI's own:
- The tokenizer and every size that follows from it come from the data module; they are not typed twice.
- A checkpoint never overrides the command line (see `checkpoint_rule`). Lightning's default does, for single files.
- ``--ckpt_path last`` is the newest step of the newest run of this experiment, ``best`` its best one. A run resumed
  from ``last`` writes on into the same directory, so that its curves stay one curve.
- validate, test and predict without --config take the ``config.yaml`` of the checkpoint's run.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from argparse import SUPPRESS
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only

from dsv41.config import DeepseekV41TextConfig
from dsv41.files import plain_name, settle
from lightning_modules import help_screen
from lightning_modules.callbacks import (
    BestCheckpoint,
    EngramGates,
    EngramMemory,
    ExpertLoad,
    FinalValidation,
    GracefulInterrupt,
    IndexerRecall,
    LatestCheckpoint,
    PartSummary,
    PeakMemory,
    PredictionFile,
    RunPages,
    RunReport,
    StepLabels,
    StreamMixers,
    TokenThroughput,
    UnigramBaseline,
    UpdateRatio,
)
from lightning_modules.checkpoint.callbacks import find_checkpoint, passed_over, run_number
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.data import TextDataModule
from lightning_modules.parsed_options import in_one_line, require_options
from lightning_modules.safe_yaml import load_plain
from lightning_modules.task import DeepseekV41Task
from lightning_modules.transfer.pretrained import default_options, require_folder

# A text configuration is a group of options, not a class to choose. What no type checks is not instantiated, and paths
# of modules that start programs, load pickles or remove files (jsonargparse's list) are refused wherever they stand.
set_parsing_settings(
    subclasses_disabled=[DeepseekV41TextConfig], instantiate_subclass_spec_in_any=False, import_path_denylist=[]
)
_yaml_load = get_loader("yaml")


def _load(text: str, path: str = "") -> Any:
    """The value of an option or, with its name as `path`, of a configuration file."""
    if not path:
        return load_plain(text, _yaml_load)
    try:
        value = load_plain(text, _yaml_load)
    except yaml.YAMLError as error:
        raise yaml.YAMLError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise yaml.YAMLError(f"{path}: must hold options in groups, such as 'model:' and below it 'optimizer:'")
    return value


set_loader("yaml", _load, (yaml.YAMLError,))

# Warnings of Lightning about what is meant to be so.
_EXPECTED = (
    ".*does not have many workers",  # rows are memory-mapped
    "Total length of `list` across ranks is zero",  # val_fraction 0 asks for it
    ".*is smaller than the logging interval",  # the task lowers the interval
    "Checkpoint directory .* exists and is not empty",  # a resumed run goes on where it was
    "The dirpath has changed",  # validate and test have a log directory of their own
    ".*with Trainer configured with multiple `ModelCheckpoint` callbacks",  # the best one stands first
    "Couldn't infer the batch indices",  # every prediction has its row_id
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # Lightning's own code on the newest torch
)


class Parser(LightningArgumentParser):
    """One line for a mistake on the command line, where the base class prints every option first; an option that is
    not written out is a mistake.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def print_help(self, file: Any = None) -> None:
        """Print every option, after a short usage."""
        help_screen.print_coloured(help_screen.short_usage(self.format_help()), file or sys.stdout)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print and leave with status 2; from Python, where leaving would end a notebook's kernel, a ValueError."""
        if not self.exit_on_error:
            raise ValueError(in_one_line(message)) from ex
        print(
            f"dsv41: error: {in_one_line(message)}\nall options: dsv41 {{fit,validate,test,predict}} --help",
            file=sys.stderr,
        )
        sys.exit(2)


class SaveRunConfig(SaveConfigCallback):
    """Saves configuration and tokenizer in the directory of a new run of fit; a resumed one has them already."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save, or raise if another run is using the directory."""
        self._log_dir = trainer.log_dir  # asked for by all ranks, since the answer is rank 0's
        if stage != "fit" or self._log_dir is None:
            return
        is_there = (Path(self._log_dir) / self.config_filename).is_file()
        if self.config.get("ckpt_path") and trainer.strategy.broadcast(is_there):
            return
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the tokenizer: the model cannot be used with another, and training it again needs the same text."""
        tokenizer = getattr(pl_module, "tokenizer", None)
        if tokenizer is not None and self._log_dir is not None:
            tokenizer.save_pretrained(Path(self._log_dir) / "tokenizer")


class DeepseekV41CLI(LightningCLI):
    """LightningCLI around `DeepseekV41Task` and `TextDataModule`."""

    def __init__(self, args: ArgsType = None, run: bool = True, **options: Any) -> None:
        self._run = run
        words = sys.argv[1:] if args is None else args
        self._first_word = words[0] if words and isinstance(words, list) else None
        super().__init__(args=args, run=run, **options)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Where a subcommand was typed first, the others get no options: making them takes a third of a second each."""
        if self._first_word in self.subcommands() and self._first_word != subcommand:
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of callbacks that every run has, and link the tokenizer."""
        # The best one first: Lightning resolves ckpt_path="best" through the first checkpoint callback.
        parser.add_lightning_class_args(BestCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(LatestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(UpdateRatio, "update_ratio")
        parser.add_lightning_class_args(IndexerRecall, "indexer_recall")
        parser.add_lightning_class_args(EngramGates, "engram_gates")
        parser.add_lightning_class_args(EngramMemory, "engram_memory")
        parser.add_lightning_class_args(StreamMixers, "stream_mixers")
        parser.add_lightning_class_args(ExpertLoad, "expert_load")
        if not self._run:
            # Those of fit, which stand in the config.yaml of its runs. What they say is up to the caller.
            parser.add_argument("--ckpt_path", type=str | None, default=None, help=SUPPRESS)
            parser.add_argument("--weights_only", type=bool | None, default=None, help=SUPPRESS)
        parser.link_arguments("data", "model.tokenizer", compute_fn=_tokenizer_of, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """LightningCLI's without its warning about arguments given from Python, which is how notebooks call it."""
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)
        subcommand = self.config["subcommand"] if self._run else None
        require_options(self._parser(subcommand), self.config if subcommand is None else self.config[subcommand])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what is no matter of configuration: how files are written, and what every run shows."""
        config = self._get(self.config_init, "trainer", default={})
        plugins = _as_list(config.get("plugins"))
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, AtomicCheckpointIO(optimizers=self.subcommand in (None, "fit"))]
        callbacks = _as_list(config.get("callbacks"))
        extra: list[Callback] = [
            PartSummary(),
            UnigramBaseline(),
            TokenThroughput(),
            PeakMemory(),
            GracefulInterrupt(),
            FinalValidation(),
            RunPages(),
            RunReport(),
        ]
        if config.get("logger") is not False:
            extra.append(LearningRateMonitor("step"))
        if self.subcommand == "predict":
            extra.append(PredictionFile())
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            # Not the rich one, which shows nothing useful in a log file.
            extra.append(TQDMProgressBar(refresh_rate=5))
        kwargs["callbacks"] = [StepLabels(), *callbacks, *extra]
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Not LightningCLI's: stored hyper-parameters do not override the command line."""

    def before_instantiate_classes(self) -> None:
        """Refuse what one process cannot build, and resolve ``--ckpt_path``, before anything is built."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        sizes = config.model.config
        pretrained = config.model.get("pretrained")
        if pretrained is not None:
            require_folder(pretrained)
        elif sizes.hidden_size == 5120 and sizes.num_hidden_layers == 40:
            raise ValueError(
                "model.config: these are the sizes of the release, 748 billion parameters, which are also the "
                "defaults; start with --config configs/tiny.yaml"
            )
        name = config.get("ckpt_path") if self._run else None
        if name in ("last", "best"):
            config.ckpt_path = str(self._resolve(config, name))
        elif name is not None and not Path(name).exists():
            raise FileNotFoundError(f"ckpt_path: {name} does not exist")

    def _resolve(self, config: Any, name: str) -> Path:
        """The file that "last" or "best" means; "last" also directs the logger to the run that it goes on from."""
        logger = config.trainer.logger
        init = getattr(logger, "init_args", None)
        if init is None or "save_dir" not in init:
            raise ValueError(f"ckpt_path: {name!r} needs trainer.logger with a save_dir, or give the file's path")
        runs = Path(init.save_dir) / init.name
        path, skipped = find_checkpoint(runs, name), passed_over(runs, name)
        if skipped:
            names = ", ".join(str(left.relative_to(runs)) for left in skipped)
            rank_zero_only(print)(
                f"ckpt_path: not complete, or left by a killed save or deletion, and skipped: {names}", file=sys.stderr
            )
        if path is None:
            raise FileNotFoundError(f"ckpt_path: no {name!r} checkpoint under {runs}; leave --ckpt_path out to start")
        if self.subcommand == "fit" and name == "last":
            rank_zero_only(settle)(path.parent)  # this run writes there from now on
            path = plain_name(path)
            init.version = run_number(path.parent.parent)
            if logger.class_path.endswith(".TensorBoardLogger"):
                # What the killed run logged after its checkpoint is superseded.
                step = int(path.stem.removeprefix("step-"))
                logger.dict_kwargs = (logger.get("dict_kwargs") or {}) | {"purge_step": step}
        rank_zero_only(print)(f"ckpt_path: {name} is {path}", file=sys.stderr)
        return path


def _no_advertisement(record: logging.LogRecord) -> bool:
    """Lightning recommends a service at every start."""
    return "litlogger" not in str(record.msg)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


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
        if path and Path(path).exists() and (saved := Path(path).absolute().parents[1] / "config.yaml").is_file():
            return [args[0], "--config", str(saved), *args[1:]]
    return args


def _with_pretrained(args: list[str]) -> list[str]:
    """Put the architecture and tokenizer of ``--model.pretrained FOLDER`` behind it: later options still count more."""
    for index, arg in enumerate(args):
        if arg == "--model.pretrained" and index + 1 < len(args):
            return [*args[: index + 2], *default_options(args[index + 1]), *args[index + 2 :]]
        if arg.startswith("--model.pretrained="):
            return [*args[: index + 1], *default_options(arg.partition("=")[2]), *args[index + 1 :]]
    return args


def get_cli(args: ArgsType = None, run: bool = True) -> DeepseekV41CLI:
    """Build the command line's objects, and with `run` execute the subcommand.

    Args:
        args: Arguments as a list of strings or a dict; None takes ``sys.argv``. With ``run=False`` there is no
            subcommand: ``get_cli(["--config", "configs/tiny.yaml"], run=False)``. The ``config.yaml`` of a run is
            taken as well.
        run: Execute. False leaves `cli.model`, `cli.datamodule` and `cli.trainer` to the caller (notebooks, tests).

    Raises:
        ValueError: With ``run=False``, `args` do not parse; names the option. Otherwise SystemExit, which says why on
            stderr.
    """
    for message in _EXPECTED:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_advertisement)
    return DeepseekV41CLI(
        model_class=DeepseekV41Task,
        datamodule_class=TextDataModule,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={"enable_model_summary": False, "use_distributed_sampler": False},
        parser_class=Parser,
        parser_kwargs=(
            {"prog": "dsv41", "description": "Train and evaluate DeepSeek-V4.1 models."}
            if run
            else {"exit_on_error": False}
        ),
        auto_configure_optimizers=False,
        args=args,
        run=run,
    )


def _rank() -> str:
    """Which rank speaks, where there is more than one."""
    return f" (rank {dist.get_rank()})" if dist.is_initialized() and dist.get_world_size() > 1 else ""


def _cause(error: BaseException) -> BaseException:
    """The error itself, where the parser has wrapped it in a description of its own machinery."""
    while error.__cause__ is not None and "compute_fn of link" in str(error):
        error = error.__cause__
    return error


def main(args: list[str] | None = None) -> None:
    """Entry point of fit, validate, test and predict. Bad input ends with one line on stderr and exit status 1 (2 if it
    does not parse).

    ``DSV41_TRACEBACK=1`` shows where it was found. An error inside the training loop always has its traceback.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        get_cli(_with_pretrained(_with_saved_config(sys.argv[1:] if args is None else args)))
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        running = any(frame.name == "advance" for frame in traceback.extract_tb(error.__traceback__))
        if running or os.environ.get("DSV41_TRACEBACK"):
            raise
        print(f"dsv41: error{_rank()}: {_cause(error)}", file=sys.stderr)
        sys.exit(1)
