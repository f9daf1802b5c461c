"""Checks of a parsed configuration that its parser leaves out, before anything is built.

jsonargparse takes null for any option and any value for a group. It also builds whatever an option's type allows:
Lightning's options are typed, so that a callback is a `Callback` and a logger a `Logger`, but some arguments of these
classes take any callable, and a configuration is not to choose what is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

from jsonargparse import Namespace
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from dsv41.config.fields import shown

_PARTS = (Accelerator, Callback, CheckpointIO, ClusterEnvironment, LayerSync, Logger, Precision, Profiler, Strategy)


def require_options(parser: LightningArgumentParser, config: Namespace) -> None:
    """Check the options that a parser has read.

    Args:
        parser: The subcommand's.
        config: Its values, nothing of them built yet.

    Raises:
        ValueError: A group is no group, an option that is not optional is null, or a function is named; begins with
            the option.
    """
    actions = [action for action in parser._actions if isinstance(action.dest, str)]
    for action in sorted(actions, key=lambda action: action.dest.count(".")):
        if type(action).__name__ == "_ActionConfigLoad":
            group = config.get(action.dest)
            if not isinstance(group, Namespace):
                raise ValueError(f"{action.dest}: must be a group of options, got {shown(group)}")
    for action in actions:
        kind = getattr(action, "_typehint", None)
        if kind is None or action.default is None or type(None) in get_args(kind) or action.dest not in config:
            continue
        if config[action.dest] is None:
            kinds = ", ".join(getattr(one, "__name__", str(one)) for one in get_args(kind) or (kind,))
            raise ValueError(f"{action.dest}: must not be null; its type is {kinds}")
    require_parts(Namespace({name: value for name, value in vars(config).items() if name != "config"}))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):  # left as it is by the parser, and so never built
        return None


def _is_called(found: Any) -> bool:
    """Whether something, or what a class makes, takes the place of a function."""
    if not isinstance(found, type):
        return callable(found)
    return not issubclass(found, _PARTS) and any("__call__" in base.__dict__ for base in found.__mro__)


def require_parts(config: Any, where: str = "") -> None:
    """Refuse functions, and classes whose instances are called like functions.

    Args:
        config: Values, nested.
        where: Their option.

    Raises:
        ValueError: Begins with the option.
    """
    if isinstance(config, Namespace | dict):
        entries = vars(config) if isinstance(config, Namespace) else config
        path = entries.get("class_path")
        if isinstance(path, str) and _is_called(_imported(path)):
            raise ValueError(f"{where}: {path} is called like a function, and a configuration names no functions")
        for name, value in entries.items():
            require_parts(value, f"{where}.{name}" if where else str(name))
    elif isinstance(config, list | tuple | set):
        for index, value in enumerate(config):
            require_parts(value, f"{where}[{index}]")
    elif callable(config) and not isinstance(config, type):
        name = f"{getattr(config, '__module__', '')}.{getattr(config, '__qualname__', config)}"
        raise ValueError(f"{where}: {name} is a function, and a configuration names no functions")
