"""Checks of ``trainer.*`` before anything is built: options, callbacks and plugins that cannot work here, each with the
reason and the way round it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_modules.strategy import EngramFSDPStrategy

_REFUSED: dict[type[Callback], str] = {
    BatchSizeFinder: "restores its trials from a checkpoint of another batch size, at which data cannot be resumed; "
    "see the memory of a data.batch_size with dsv41 inspect",
    LearningRateFinder: "sets an attribute lr and replaces the schedule, while rates here are per group, in "
    "model.optimizer; compare short runs with --model.optimizer.lr",
    OnExceptionCheckpoint: "saves inside an optimizer step, and loads its file unasked; --checkpoint.every_n_steps "
    "saves between steps, and --ckpt_path last resumes",
}
_REFUSED_SHARDED: dict[type[Callback], str] = {
    WeightAveraging: "copies the model before it is sharded, which works on one device only",
    StochasticWeightAveraging: "copies the model before it is sharded, which works on one device only",
}


def _classes(value: Any) -> list[type]:
    found = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Namespace) and "class_path" in one:
            module, _, name = one.class_path.rpartition(".")
            found.append(getattr(import_module(module), name))
        elif one is not None:
            found.append(type(one))
    return found


def _is_sharded(strategy: Any) -> bool:
    return strategy == "engram_fsdp" or any(issubclass(one, EngramFSDPStrategy) for one in _classes(strategy))


def check_trainer_options(trainer: Namespace) -> None:
    """Refuse what cannot work.

    Args:
        trainer: Parsed options ``trainer.*``.

    Raises:
        ValueError: One line that names the option, the reason and what to do.
    """
    if trainer.get("enable_checkpointing") is False:
        raise ValueError(
            "trainer.enable_checkpointing: must be true or null, since a run ends with a checkpoint to resume from; "
            "--checkpoint.every_n_steps with a large number leaves only that one"
        )
    if trainer.get("barebones"):
        raise ValueError(
            "trainer.barebones: must be false: it forbids checkpoints, loggers and the progress bar, which every run "
            "has"
        )
    for kind in _classes(trainer.get("callbacks")):
        refused = _REFUSED | (_REFUSED_SHARDED if _is_sharded(trainer.get("strategy")) else {})
        for base, reason in refused.items():
            if issubclass(kind, base):
                under = " under strategy engram_fsdp" if base in _REFUSED_SHARDED else ""
                raise ValueError(f"trainer.callbacks: {kind.__name__} is not supported{under}: it {reason}")
    plugins = trainer.get("plugins")
    for one in plugins if isinstance(plugins, list | tuple) else [plugins]:
        if any(issubclass(kind, SLURMEnvironment) for kind in _classes(one)) and (
            not isinstance(one, Namespace) or (one.get("init_args") or Namespace()).get("auto_requeue") is not False
        ):
            raise ValueError(
                "trainer.plugins: SLURMEnvironment: auto_requeue must be false, since Lightning then saves inside an "
                "optimizer step; requeue in the batch script (docs/running.md)"
            )


def slurm_plugin(plugins: list[Any]) -> list[SLURMEnvironment]:
    """Environment that takes SLURM's variables without Lightning's own handler of SIGUSR1, where they are set.

    Args:
        plugins: Those of the command line; nothing is added where one of them is an environment.
    """
    given = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins) or TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if not given and SLURMEnvironment.detect() else []
