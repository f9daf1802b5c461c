"""Expansion of ``~`` and environment variables in the options that name files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Last parts of dotted option names whose values are paths, ours and those of Lightning's loggers and callbacks.
PATH_OPTIONS = frozenset(
    ["cache_dir", "ckpt_path", "default_root_dir", "dir", "dirpath", "pretrained", "root_dir", "save_dir", "source"]
) | {"tokenizer"}
_UNKNOWN = re.compile(r"\$(\w+|\{[^}]*\})")


def expanded(text: str, option: str) -> str:
    """`text` with ``~``, ``~user``, ``$NAME`` and ``${NAME}`` replaced; what exists as it is written stays.

    Args:
        text: Path, or a name such as "stdlib", which has nothing to replace.
        option: Option that the path was given for.

    Raises:
        ValueError: A variable is not set, or there is no such home directory; the message names the option.
    """
    if not ("$" in text or text.startswith("~")) or Path(text).exists():
        return text
    path = os.path.expanduser(os.path.expandvars(text))
    if unknown := _UNKNOWN.search(path):
        raise ValueError(f"{option}: {text}: the environment variable {unknown[0]} is not set")
    if path.startswith("~"):
        raise ValueError(f"{option}: {text}: there is no such home directory")
    return path


def _places(config: Any, prefix: str) -> Iterator[tuple[Any, Any, str]]:
    """Holder, key and dotted name of every leaf of nested namespaces, dictionaries and lists."""
    if isinstance(config, list):
        members: Any = enumerate(config)
    elif isinstance(config, dict):
        members = list(config.items())
    else:
        members = list(vars(config).items())
    for key, value in members:
        name = prefix if isinstance(config, list) else f"{prefix}.{key}".lstrip(".")
        if isinstance(value, dict | list) or hasattr(value, "__dict__"):
            yield from _places(value, name)
        else:
            yield config, key, name


def expand_paths(config: Any) -> None:
    """Expand, in place, every value of a parsed configuration that `PATH_OPTIONS` names.

    Args:
        config: Namespace of jsonargparse, of the options of one subcommand or of all.

    Raises:
        ValueError: As `expanded`.
    """
    for holder, key, name in list(_places(config, "")):
        value = holder[key] if isinstance(holder, dict | list) else getattr(holder, key)
        if name.rpartition(".")[2] in PATH_OPTIONS and isinstance(value, str):
            new = expanded(value, name)
            if isinstance(holder, dict | list):
                holder[key] = new
            else:
                setattr(holder, key, new)
