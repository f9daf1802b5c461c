"""Study as described by its YAML file: a base, variants of it, seeds.

    base:
      config: [../tiny.yaml]                      # files of `dsv41 fit`, later ones count more
      options: {trainer: {max_steps: 400}}        # like another file after them; holds for every variant
    variants:
      no_engram:
        config: [../overlays/no_engram.yaml]
        options: {model: {config: {...}}}
        match: parameters                         # or flops, or none (default)
    seeds: [0, 1, 2]
    output: runs/ablations/engram

Files are looked for beside the study's file, then in the working directory. `output` is relative to the latter.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lightning_modules.options.paths import expanded
from lightning_modules.options.safe_yaml import load_plain

Match = Literal["none", "parameters", "flops"]
BASE = "base"
_NAME = re.compile(r"^(?!(seed|version)_\d)[A-Za-z0-9][\w.-]*$")


@dataclass(frozen=True)
class Variant:
    """Variant: files and options on top of the base.

    Attributes:
        name: "base", or as in the file.
        config: Files after the base's.
        options: Nested, as in a file; after all files.
        match: Measure of the base that the variant is resized to.
    """

    name: str
    config: tuple[Path, ...]
    options: dict[str, Any]
    match: Match


@dataclass(frozen=True)
class Study:
    """Study: base, variants and seeds.

    Attributes:
        name: File name without the suffix.
        config: Files of the base.
        options: The base's own, nested.
        variants: The base first.
        seeds: Of every variant: initial values and order of the rows.
        output: Folder of everything that the study writes.
    """

    name: str
    config: tuple[Path, ...]
    options: dict[str, Any]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    output: Path


class _NoDuplicates(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, where PyYAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, or ConstructorError naming the key that comes twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _mapping(value: Any, where: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a mapping, got {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(
                f"{where}: {key!r} must be a text (YAML reads on, off, yes and no as truth values; quote it)"
            )
        if allowed is not None and key not in allowed:
            raise ValueError(f"{where}: there is no key {key!r}; the keys are {', '.join(allowed)}")
    return value


def _files(value: Any, where: str, beside: Path) -> tuple[Path, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}: must be a list of files, got {value!r}")
    found = []
    for name in value:
        path = next((path for path in (beside / name, Path(name)) if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"{where}: there is no file {name}, neither in {beside} nor in the working directory"
            )
        found.append(path)
    return tuple(found)


def read_study(path: Path) -> Study:
    """Read a study's file.

    Raises:
        FileNotFoundError: It, or a file that it names, does not exist.
        ValueError: It is no YAML, has a key that there is not, or a value out of its range; names file and key.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--config: {path} does not exist")
    try:
        loaded = load_plain(path.read_text(encoding="utf-8"), lambda text: yaml.load(text, Loader=_NoDuplicates))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    top = _mapping(loaded, str(path), ("base", "variants", "seeds", "output"))
    base = _mapping(top.get("base"), f"{path}: base", ("config", "options"))
    config = _files(base.get("config"), f"{path}: base.config", path.parent)
    if not config:
        raise ValueError(f"{path}: base.config: must name at least one file")
    variants = [Variant(BASE, (), {}, "none")]
    for name, value in _mapping(top.get("variants"), f"{path}: variants").items():
        where = f"{path}: variants.{name}"
        if name == BASE or not _NAME.match(name):
            raise ValueError(
                f"{where}: must be of letters, digits, '_', '-' and '.', and none of base, seed_N and version_N"
            )
        own = _mapping(value, where, ("config", "options", "match"))
        match = own.get("match", "none")
        if match not in get_args(Match):
            raise ValueError(f"{where}.match: must be one of {', '.join(get_args(Match))}, got {match!r}")
        files = _files(own.get("config"), f"{where}.config", path.parent)
        options = _mapping(own.get("options"), f"{where}.options")
        if not files and not options:
            raise ValueError(f"{where}: must change something, with config or options")
        variants.append(Variant(name, files, options, match))
    if len(variants) == 1:
        raise ValueError(f"{path}: variants: must be at least one")
    seeds = top.get("seeds")
    if (
        not isinstance(seeds, list)
        or not seeds
        or any(not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise ValueError(f"{path}: seeds: must be a list of different integers of at least 0, got {seeds!r}")
    output = top.get("output")
    if not isinstance(output, str) or not output:
        raise ValueError(f"{path}: output: must be a folder, got {output!r}")
    options = _mapping(base.get("options"), f"{path}: base.options")
    return Study(path.stem, config, options, tuple(variants), tuple(seeds), Path(expanded(output, f"{path}: output")))
