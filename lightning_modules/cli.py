"""The command line: ``dsv41 fit | validate | test | predict``, LightningCLI with this project's parts filled in.

Rules beyond LightningCLI's own:
- The tokenizer and every size that follows from it come from the data module; they are not typed twice.
- Mistakes in anything but the data are found before data is read: the tokenizer is the last that a run is made of.
- ``--model_class`` and ``--data_class`` put a user's own task and data module in place of this project's, with their
  arguments as options; a task that leaves `configure_optimizers` alone may have any ``--optimizer`` and
  ``--lr_scheduler`` of torch.
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
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import DoublePrecision

from dsv41.config import DeepseekV41TextConfig
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
    RunProgressBar,
    RunReport,
    RunTimer,
    SaveRunConfig,
    StepLabels,
    StreamMixers,
    TokenThroughput,
    UnigramBaseline,
    UpdateRatio,
)
from lightning_modules.checkpoint.find import BEST_NAME, CONFIG, NAMES, missing, run_of
from lightning_modules.checkpoint.run_directory import check_new_run, check_resumed_run, resolve
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.command_line.arguments import READING, prepared
from lightning_modules.command_line.chosen_optimizer import add_optimizer_options, use_chosen_optimizer
from lightning_modules.command_line.ranges import require_ranges
from lightning_modules.command_line.trainer_options import check_trainer_options, slurm_plugin
from lightning_modules.data import TextDataModule
from lightning_modules.options import help_screen
from lightning_modules.options.classes import chosen_class, written_out
from lightning_modules.options.messages import in_one_line
from lightning_modules.options.metric_names import METRICS
from lightning_modules.options.parsed import require_options
from lightning_modules.options.paths import expand_paths
from lightning_modules.options.safe_yaml import load_plain
from lightning_modules.preflight import require_monitors, require_options_of_trainer
from lightning_modules.strategy import EngramFSDPStrategy
from lightning_modules.task import DeepseekV41Task
from lightning_modules.training.lightning_private import load_only_what_is_asked_for, share_version
from lightning_modules.transfer.pretrained import require_folder

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
    "The dirpath has changed",  # validate and test have no log directory
    "Experiment logs directory .* exists and is not empty",  # beside another logger, or resumed with its history
    ".*with Trainer configured with multiple `ModelCheckpoint` callbacks",  # the best one stands first
    "You're using the WeightAveraging callback",  # refused where the model is sharded
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
            raise ValueError(in_one_line(message, self)) from ex
        print(
            f"dsv41: error: {in_one_line(message, self)}\nall options: dsv41 {{fit,validate,test,predict}} --help",
            file=sys.stderr,
        )
        sys.exit(2)


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
        parser.add_argument(
            "--model_class",
            type=str | None,
            default=None,
            help="Task derived from DeepseekV41Task, such as mypkg.MyTask.",
        )
        parser.add_argument(
            "--data_class", type=str | None, default=None, help="LightningDataModule, such as mypkg.MyData."
        )
        if self._model_class is not DeepseekV41Task:
            add_optimizer_options(parser, self._model_class, DeepseekV41Task)
        if any(str(action.dest).startswith("model.tokenizer") for action in parser._actions):
            parser.link_arguments("data", "model.tokenizer", compute_fn=_no_tokenizer_yet, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """LightningCLI's without its warning about arguments given from Python, which is how notebooks call it."""
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)
        subcommand = self.config["subcommand"] if self._run else None
        options = self.config if subcommand is None else self.config[subcommand]
        require_options(self._parser(subcommand), options)
        require_ranges(options)

    def instantiate_classes(self) -> None:
        """Build everything that needs no data, check it, and only then ask the data for its tokenizer."""
        super().instantiate_classes()
        use_chosen_optimizer(
            self.model, self._get(self.config_init, "optimizer"), self._get(self.config_init, "lr_scheduler")
        )
        if self.subcommand is not None:
            self.model.require_ready(self.trainer, self.datamodule, self.subcommand)
            if type(self.model) is DeepseekV41Task:
                require_monitors(self.trainer, METRICS)
        tokenizer = getattr(self.datamodule, "fast_tokenizer", None)
        if tokenizer is not None:
            self.model.use_tokenizer(tokenizer)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what is no matter of configuration: how files are written, and what every run shows."""
        config = self._get(self.config_init, "trainer", default={})
        require_options_of_trainer(dict(config))
        plugins = _as_list(config.get("plugins"))
        plugins += slurm_plugin(plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO(optimizers=self.subcommand in (None, "fit")))
        if isinstance(config.get("strategy"), EngramFSDPStrategy) and config.get("precision") in (64, "64", "64-true"):
            # Lightning refuses it for what is derived from its own strategy, unless the strategy is given by name.
            kwargs["precision"] = None
            plugins.append(DoublePrecision())
        kwargs["plugins"] = plugins
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
        if config.get("max_time") is not None:
            extra.append(RunTimer(config["max_time"]))
            kwargs["max_time"] = None
        if self.subcommand == "predict":
            extra.append(PredictionFile())
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            # Not the rich one, which shows nothing useful in a log file.
            extra.append(RunProgressBar(refresh_rate=5))
        kwargs["callbacks"] = [StepLabels(), *callbacks, *extra]
        trainer = super().instantiate_trainer(**kwargs)
        load_only_what_is_asked_for(trainer)
        share_version(trainer)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Not LightningCLI's: stored hyper-parameters do not override the command line."""

    def before_instantiate_classes(self) -> None:
        """Refuse what cannot work, and resolve ``--ckpt_path``, before anything is built."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        expand_paths(config)
        check_trainer_options(config.trainer)
        self._resolve_checkpoint(config)
        sizes = config.model.config
        pretrained = config.model.get("pretrained")
        if pretrained is not None:
            require_folder(pretrained)
        elif sizes.hidden_size == 5120 and sizes.num_hidden_layers == 40:
            raise ValueError(_release_sizes(config))
        if self.subcommand in READING:
            config.trainer.logger = False  # they print their numbers, and leave the run's curves alone

    def _resolve_checkpoint(self, config: Any) -> None:
        name, fits = config.get("ckpt_path") if self._run else None, self.subcommand == "fit"
        if name in NAMES:
            config.ckpt_path = str(resolve(config.trainer, name, resume=fits and name == "last"))
        elif name is not None and not Path(name).exists():
            raise FileNotFoundError(f"ckpt_path: {missing(Path(name))}")
        elif name is not None and fits:
            check_resumed_run(config.trainer, Path(name))
        if fits and name in (None, BEST_NAME) and not config.trainer.get("fast_dev_run"):
            check_new_run(config.trainer)


def _release_sizes(config: Any) -> str:
    """Answer to a command line that leaves the sizes at their defaults."""
    text = "model.config: these are the sizes of the release, 748 billion parameters, which are also the defaults; "
    if config.get("ckpt_path"):
        saved = run_of(Path(config.ckpt_path)) / CONFIG
        return text + f"--ckpt_path brings no configuration to fit: give that of its run, --config {saved}"
    return text + "start with --config configs/tiny.yaml"


def _no_advertisement(record: logging.LogRecord) -> bool:
    """Lightning recommends a service at every start."""
    return "litlogger" not in str(record.msg)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _no_tokenizer_yet(data: LightningDataModule) -> None:
    """Reading data waits until everything else is built and checked: see `DeepseekV41CLI.instantiate_classes`."""


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
    args = sys.argv[1:] if args is None else args
    args = written_out(args) if isinstance(args, list) else args
    return DeepseekV41CLI(
        model_class=chosen_class(args, "model_class", DeepseekV41Task) or DeepseekV41Task,
        datamodule_class=chosen_class(args, "data_class", LightningDataModule) or TextDataModule,
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

    ``DSV41_TRACEBACK=1`` shows where it was found. An error inside the training loop that is of no kind that bad input
    makes has its traceback: it may come hours after the start, and it is a mistake in code.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        get_cli(prepared(written_out(sys.argv[1:] if args is None else args)))
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | ImportError | MisconfigurationException)
        frames = traceback.extract_tb(error.__traceback__)
        running = any(frame.name == "advance" for frame in frames)
        if os.environ.get("DSV41_TRACEBACK") or (running and not expected):
            raise
        told = _described(_cause(error), expected)
        if any(frame.filename.endswith("checkpoint_connector.py") for frame in frames) and "ckpt_path" not in told:
            told = f"ckpt_path: nothing can be restored from it: {told.replace(_WHERE, '')}"
        print(f"dsv41: error{_rank()}: {told}", file=sys.stderr)
        sys.exit(1)


_WHERE = " (DSV41_TRACEBACK=1 shows where)"


def _described(error: BaseException, expected: bool) -> str:
    """An error in one line; of a kind that bad input does not make, with its type and the way to its place."""
    text = " ".join(str(error).split())
    return text if expected and text else f"{type(error).__name__}: {text}{_WHERE}"
