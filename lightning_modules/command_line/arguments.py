"""What is put before or behind the words of a command line before LightningCLI parses them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_modules.checkpoint.find import NAMES
from lightning_modules.checkpoint.run_directory import require_configuration
from lightning_modules.options.paths import expanded
from lightning_modules.options.safe_yaml import load_plain
from lightning_modules.transfer.pretrained import default_options

READING = ("validate", "test", "predict")  # subcommands that only read a checkpoint
# Options without a dot, as jsonargparse would spell them in the environment; the others have "__" for each dot.
_PLAIN_OPTIONS = ("CKPT_PATH", "CONFIG", "SEED_EVERYTHING", "SUBCOMMAND", "VERBOSE", "WEIGHTS_ONLY")


def values_of(args: list[str], *options: str) -> list[str]:
    """Values of an option in the words of a command line, as ``--option VALUE`` or ``--option=VALUE``, in order."""
    found = []
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in options and equals:
            found.append(value)
        elif arg in options and index + 1 < len(args):
            found.append(args[index + 1])
    return found


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse environment variables in the form of options: options come from files and the command line alone.

    Raises:
        ValueError: Names the variable and the option that it could have been meant for.
    """
    for name in environment:
        words = name.removeprefix("DSV41_")
        if words != name and ("__" in words or words in _PLAIN_OPTIONS):
            option = words.lower().replace("__", ".")
            for subcommand in ("fit", *READING):
                option = option.removeprefix(f"{subcommand}.")
            raise ValueError(
                f"{name}: options are not read from the environment; unset it, and give --{option} if that was meant"
            )


def with_saved_config(args: list[str]) -> list[str]:
    """For a subcommand that only reads a checkpoint, put the run's saved configuration before the other options.

    Raises:
        FileNotFoundError: The checkpoint, or its run's ``config.yaml``, does not exist.
        ValueError: Neither a checkpoint's path nor a configuration was given.
    """
    asks = {"-h", "--help", "--print_config"} & {arg.partition("=")[0] for arg in args}
    if not args or args[0] not in READING or values_of(args, "-c", "--config") or asks:
        return args
    paths = values_of(args, "--ckpt_path")
    if not paths and values_of(args, "--model.pretrained"):
        return args
    if not paths or paths[-1] in NAMES:
        what = f"{paths[-1]!r} is looked for among the runs of a configuration" if paths else "no checkpoint is named"
        raise ValueError(
            f"ckpt_path: {what}; give --config too, or --ckpt_path RUN/checkpoints/best.ckpt, whose run has one"
        )
    return [args[0], "--config", str(require_configuration(expanded(paths[-1], "ckpt_path"))), *args[1:]]


def with_pretrained(args: list[str]) -> list[str]:
    """Put the architecture and tokenizer of ``--model.pretrained FOLDER`` behind it: later options still count more."""
    for index, arg in enumerate(args):
        if arg == "--model.pretrained" and index + 1 < len(args):
            return [*args[: index + 2], *default_options(args[index + 1]), *args[index + 2 :]]
        if arg.startswith("--model.pretrained="):
            return [*args[: index + 1], *default_options(arg.partition("=")[2]), *args[index + 1 :]]
    return args


def _experiment_in(file: str) -> str | None:
    """``trainer.logger.init_args.name`` of a configuration file; None if it has none or is none."""
    try:
        value: Any = load_plain(Path(file).read_text())
        for key in ("trainer", "logger", "init_args", "name"):
            value = value[key]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, IndexError):
        return None  # the parser has its own words for it
    return value if isinstance(value, str) else None


def with_joined_name(args: list[str]) -> list[str]:
    """Name the experiment after all overlays: tiny-no-engram-window-only, where the last file alone would say.

    Joined are the names of the files that begin with the first one's and a hyphen. An option behind the last file still
    counts more.
    """
    places = [
        index + (1 if arg in ("-c", "--config") else 0)
        for index, arg in enumerate(args)
        if arg in ("-c", "--config") or arg.startswith("--config=")
    ]
    files = values_of(args, "-c", "--config")
    names = [name for name in map(_experiment_in, files) if name is not None]
    if len(names) < 3:
        return args
    base, overlays = names[0], list(dict.fromkeys(names[1:]))
    if len(overlays) < 2 or not all(name.startswith(f"{base}-") for name in overlays):
        return args
    joined = base + "".join(name.removeprefix(base) for name in overlays)
    end = places[-1] + 1
    return [*args[:end], "--trainer.logger.init_args.name", joined, *args[end:]]


def prepared(args: list[str]) -> list[str]:
    """The words as LightningCLI is to parse them.

    Raises:
        FileNotFoundError: As `with_saved_config`.
        ValueError: As `with_saved_config` and `check_environment`.
    """
    check_environment()
    if args and args[0] in READING and values_of(args, "--trainer.logger"):
        print(f"trainer.logger: {args[0]} writes no curves, it prints its numbers", file=sys.stderr)
    return with_joined_name(with_pretrained(with_saved_config(args)))
