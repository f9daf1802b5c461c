"""Directory of a run: the one place that derives it from loggers, before and after there is a Trainer.

It is SAVE_DIR/NAME/VERSION of the first logger, as Lightning's ModelCheckpoint has it for every kind of logger, and
``trainer.default_root_dir`` (by default the working directory) without one. Checkpoints, configuration and tokenizer
lie there.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from dsv41.files import plain_name, settle
from lightning_modules.checkpoint.csv_history import ResumedCSVLogger
from lightning_modules.checkpoint.find import (
    CHECKPOINTS,
    CONFIG,
    missing,
    run_name,
    run_number,
    run_of,
    runs_in,
    runs_of_services,
    search,
    step_of,
    steps_in,
)
from lightning_modules.options.safe_yaml import load_plain

# Options by which loggers take the name of an existing run.
_VERSION_OPTIONS = ("version", "run_id", "id", "experiment_key")
# Options of services' loggers that say which experiment a run belongs to.
_EXPERIMENT_OPTIONS = ("project", "experiment_name", "entity", "workspace", "save_dir", "dir", "tracking_uri")


def _runs_of(logger: Logger, root: str | Path) -> Path:
    return Path(logger.save_dir or root) / str(logger.name)


def run_directory(trainer: L.Trainer) -> Path:
    """Directory of the trainer's run, the same on all ranks, which all have to ask.

    Loggers of services begin their run at the latest now: only they know its name.
    """
    if not trainer.loggers:
        directory = Path(trainer.default_root_dir)
    else:
        first = trainer.loggers[0]
        directory = _runs_of(first, trainer.default_root_dir) / run_name(first.version)
    return Path(trainer.strategy.broadcast(str(directory)))


@dataclass(frozen=True)
class Place:
    """Runs of the experiment that a command line describes.

    Attributes:
        runs: Directory that holds them.
        run: The one that is meant: that of a typed version, or without a logger the only one; else None.
        option: Option that says so.
        candidates: Runs to search, the newest first.
    """

    runs: Path
    run: Path | None
    option: str
    candidates: tuple[Path, ...]


def _class_of(spec: Namespace) -> type[Logger]:
    module, _, name = spec.class_path.rpartition(".")
    return getattr(import_module(module), name)


def _specs(trainer: Namespace) -> list[Namespace]:
    """Loggers of the parsed options ``trainer.*``, each with class_path and init_args; none if switched off."""
    logger = trainer.get("logger")
    if logger is False:
        return []
    if logger is None or logger is True:  # what Lightning takes for it
        save_dir = trainer.get("default_root_dir") or os.getcwd()
        return [_tensorboard(save_dir)]
    return list(logger) if isinstance(logger, list | tuple) else [logger]


def _tensorboard(save_dir: str) -> Namespace:
    kind = TensorBoardLogger
    return Namespace(class_path=f"{kind.__module__}.{kind.__qualname__}", init_args=Namespace(save_dir=str(save_dir)))


def _made(spec: Namespace) -> Logger:
    init = spec.get("init_args") or Namespace()
    return _class_of(spec)(**{**init.as_dict(), **dict(spec.get("dict_kwargs") or {})})


def _typed_version(spec: Namespace) -> str | None:
    init = spec.get("init_args") or Namespace()
    return next((option for option in _VERSION_OPTIONS if init.get(option) is not None), None)


def place_of(trainer: Namespace) -> Place:
    """Place of the runs that parsed options ``trainer.*`` describe. Makes no directory, and begins no service's run."""
    root = Path(trainer.get("default_root_dir") or os.getcwd())
    specs = _specs(trainer)
    if not specs:
        return Place(root, root, "trainer.default_root_dir", (root,))
    logger, typed = _made(specs[0]), _typed_version(specs[0])
    option = f"trainer.logger.init_args.{typed or 'version'}"
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        runs = _runs_of(logger, root)
        run = None if typed is None else runs / run_name(logger.version)
        return Place(runs, run, option, tuple(runs_in(runs)) if run is None else (run,))
    runs = Path(logger.save_dir or root)
    found = [run for run in runs_of_services(runs) if _is_of_experiment(run, specs[0])]
    if typed is None:
        return Place(runs, None, option, tuple(found))
    version = str(specs[0].init_args[typed])
    run = next((run for run in found if run.name == version), runs / "*" / version)
    return Place(runs, run, option, (run,))


def _is_of_experiment(run: Path, spec: Namespace) -> bool:
    """Whether a run's saved configuration has the logger `spec`, as far as the experiment goes.

    Asking the logger itself for the experiment's name would begin a run of some services.
    """
    saved: Any = load_plain((run / CONFIG).read_text())
    try:
        logger = saved["trainer"]["logger"]
        logger = logger[0] if isinstance(logger, list) else logger
        there, here = logger.get("init_args") or {}, spec.get("init_args") or Namespace()
        return logger["class_path"] == spec.class_path and all(
            there.get(option) == here.get(option) for option in _EXPERIMENT_OPTIONS
        )
    except (KeyError, TypeError, AttributeError):
        return False


def resolve(trainer: Namespace, name: str, resume: bool) -> Path:
    """Checkpoint that "last" or "best" means; reported on stderr, with what was passed over.

    Args:
        trainer: Parsed options ``trainer.*``. With `resume` the loggers are directed to the run, in place.
        name: "last" or "best".
        resume: The run is to be continued in its own directory, which is tidied.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A logger cannot be directed to the run.
    """
    place = place_of(trainer)
    found = search(place.candidates, name)
    if found.skipped:
        names = ", ".join(str(left.relative_to(place.runs)) for left in found.skipped)
        rank_zero_only(print)(
            f"ckpt_path: not complete, or left by a killed save or deletion, and skipped: {names}", file=sys.stderr
        )
    path = found.path
    if path is None:
        where = f"under {place.runs}" if place.run is None else f"in {place.run}, which {place.option} names"
        raise FileNotFoundError(f"ckpt_path: no {name!r} checkpoint {where}; leave --ckpt_path out to start")
    if resume:
        direct_loggers(trainer, path.parent.parent, step_of(path))
        rank_zero_only(settle)(path.parent)  # this run writes there from now on
        path = plain_name(path)
    rank_zero_only(print)(f"ckpt_path: {name} is {path}", file=sys.stderr)
    return path


def _direct_to_service(spec: Namespace, run: Path) -> None:
    takes = inspect.signature(_class_of(spec).__init__).parameters
    option = next((option for option in _VERSION_OPTIONS if option in takes), None)
    if option is None:
        raise ValueError(
            f"ckpt_path: 'last' is continued in its own directory, but trainer.logger {spec.class_path} takes none of "
            f"{', '.join(_VERSION_OPTIONS)}; give the checkpoint's path, which starts a new run"
        )
    spec.init_args = spec.get("init_args") or Namespace()
    spec.init_args[option] = run.name


def direct_loggers(trainer: Namespace, run: Path, step: int | None) -> None:
    """Direct the loggers of parsed options ``trainer.*`` to an existing run, in place.

    TensorBoardLogger and CSVLogger keep the curves that are there; what a killed run has logged at `step` and after it
    is superseded. Of a list of loggers, those follow that write into the same directory as the first.

    Args:
        trainer: Parsed options.
        run: Directory of the run.
        step: Optimizer steps of the checkpoint that the run is resumed from; None keeps all points.

    Raises:
        ValueError: A logger cannot be directed.
    """
    specs = _specs(trainer)
    if not specs:
        return
    number = run_number(run)
    root = trainer.get("default_root_dir") or os.getcwd()
    for spec in specs:
        kind = _class_of(spec)
        if not issubclass(kind, TensorBoardLogger | CSVLogger):
            if spec is specs[0]:
                _direct_to_service(spec, run)
            continue
        if _runs_of(_made(spec), root) != run.parent:
            continue
        spec.init_args.version = run.name if number is None else number
        if issubclass(kind, TensorBoardLogger):
            if step is not None:
                spec.dict_kwargs = (spec.get("dict_kwargs") or {}) | {"purge_step": step}
        elif kind in (CSVLogger, ResumedCSVLogger):
            spec.class_path = f"{ResumedCSVLogger.__module__}.{ResumedCSVLogger.__qualname__}"
            spec.init_args.resume_step = step
        else:
            raise ValueError(
                f"ckpt_path: trainer.logger {spec.class_path} would delete the metrics.csv of {run}, as its base class "
                "CSVLogger does; give the checkpoint's path, which starts a new run"
            )
    trainer.logger = specs if isinstance(trainer.get("logger"), list | tuple) else specs[0]


def check_new_run(trainer: Namespace) -> None:
    """Refuse to start a run in the directory of another.

    Raises:
        FileExistsError: The options name a run that is there; the message says how to resume it.
    """
    specs = _specs(trainer)
    if specs and _typed_version(specs[0]) is None:
        return
    place = place_of(trainer)
    if place.run is not None and (found := _sign_of_run(place.run)):
        raise FileExistsError(
            f"{place.option}: {place.run} holds a run already ({found}); resume it with --ckpt_path last, or give "
            "another"
        )


def check_resumed_run(trainer: Namespace, checkpoint: Path) -> None:
    """Prepare to write on into a typed version from a checkpoint given by its path.

    Raises:
        ValueError: The version's run has newer steps, which its own next save would remove.
    """
    specs = _specs(trainer)
    if specs and _typed_version(specs[0]) is None:
        return
    place = place_of(trainer)
    if place.run is None or not _sign_of_run(place.run):
        return
    steps = steps_in(place.run / CHECKPOINTS)
    if steps and steps[-1].resolve() != checkpoint.resolve():
        raise ValueError(
            f"{place.option}: {place.run} has {steps[-1].name}, and is not continued from {checkpoint}; use "
            "--ckpt_path last, or leave the option out to start a new run"
        )
    direct_loggers(trainer, place.run, step_of(checkpoint))


def _sign_of_run(run: Path) -> str | None:
    """Name of a file that only a run of this project has left in `run`, or None."""
    if (run / CONFIG).is_file():
        return CONFIG
    steps = steps_in(run / CHECKPOINTS)
    return f"{CHECKPOINTS}/{steps[-1].name}" if steps else None


def require_configuration(checkpoint: str) -> Path:
    """The configuration beside a checkpoint.

    Raises:
        FileNotFoundError: The checkpoint or its run's configuration does not exist; the message says which.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"ckpt_path: {missing(path)}")
    saved = run_of(path) / CONFIG
    if not saved.is_file():
        raise FileNotFoundError(f"ckpt_path: {path} has no configuration of its run: {saved} is missing; give --config")
    return saved
