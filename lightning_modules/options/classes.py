"""Task and data module of a user, chosen by ``model_class`` and ``data_class`` before the parser is built.

A class's own arguments are the options under ``model.`` and ``data.``, so it has to be known first. It may be typed
(``--model_class mypkg.MyTask``, or shorter ``--model mypkg.MyTask``) or stand in a configuration file, and is saved in
the run's ``config.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_modules.options.safe_yaml import load_plain

OPTIONS = {"model": "model_class", "data": "data_class"}
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def written_out(args: list[str]) -> list[str]:
    """Options with ``--model mypkg.MyTask`` as ``--model_class mypkg.MyTask``; a file or a value stays what it is."""
    words = list(args)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name.removeprefix("--")) if name.startswith("--") else None
        if option is None:
            continue
        value = value if equals else words[index + 1] if index + 1 < len(words) else ""
        if _PATH.fullmatch(value) and not Path(value).exists():
            words[index] = f"--{option}={value}" if equals else f"--{option}"
    return words


def chosen_class(args: Any, option: str, base: type) -> type | None:
    """The class that the arguments choose, the last choice counting.

    Args:
        args: Options as a list, or a configuration as a dict.
        option: "model_class" or "data_class".
        base: It has to be derived from.

    Returns:
        The class, or None if none is chosen.

    Raises:
        ValueError: There is no such class, or it is of another kind; begins with the option. A configuration file is
            not in UTF-8; begins with the file.
    """
    path = None
    for value in _choices(args, option):
        path = value
    if path is None:
        return None
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ValueError(f"{option}: must be the path of a class, such as mypkg.MyTask, got {path!r}")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {path} cannot be imported ({error})") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{option}: {path} is not derived from {base.__name__}")
    return found


def _choices(args: Any, option: str) -> Iterator[Any]:
    if isinstance(args, dict | Namespace):
        if (value := args.get(option)) is not None:
            yield value
        return
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        value = value if equals else args[index + 1] if index + 1 < len(args) else ""
        if name == f"--{option}":
            yield value
        elif name in ("-c", "--config"):
            found = _of_file(value, option)
            if found is not None:
                yield found


def _of_file(config: str, option: str) -> Any:
    """What a configuration, a file's name or a text, says at its top; what else is wrong with it is told later."""
    try:
        is_file = Path(config).is_file()
    except (OSError, ValueError):  # a text that is no name
        is_file = False
    try:
        text = Path(config).read_text(encoding="utf-8") if is_file else config
    except UnicodeDecodeError as error:
        raise ValueError(f"{config}: must be text in UTF-8, and byte {error.start} is none ({error.reason})") from None
    except OSError:
        return None
    if option not in text:
        return None
    try:
        found = load_plain(text)
    except yaml.YAMLError:
        return None
    return found.get(option) if isinstance(found, dict) else None
