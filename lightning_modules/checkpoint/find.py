"""Search for checkpoints by name: "last", "best", and what is passed over on the way to them.

A run's checkpoints are RUN/checkpoints/step-00000100.ckpt, ... and RUN/checkpoints/best.ckpt, files or folders. Nothing
here renames or deletes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv41.files import leftovers, plain_name, whole_names

BEST_NAME = "best"
NAMES = ("last", BEST_NAME)
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
_STEP_FILE = re.compile(r"^step-(\d+)\.ckpt$")
_BEST_FILE = re.compile(rf"^{BEST_NAME}\.ckpt$")
_RUN_FOLDER = re.compile(r"^version_(\d+)$")


@dataclass(frozen=True)
class Search:
    """Result of a search.

    Attributes:
        path: Checkpoint that was found, under its name or waiting for it after a kill; None if there is none.
        skipped: Incomplete checkpoints, and leftovers of kills, in the runs that were looked into.
    """

    path: Path | None
    skipped: tuple[Path, ...] = ()


def run_of(checkpoint: Path) -> Path:
    """Directory of a checkpoint's run: the folder above ``checkpoints``; elsewhere the checkpoint's own folder."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def run_name(version: Any) -> str:
    """Name of a run's directory, as loggers make it from their version: a text itself, ``version_N`` of a number."""
    return version if isinstance(version, str) else f"version_{version}"


def run_number(folder: Path) -> int | None:
    """N of a run directory ``version_N`` as TensorBoardLogger and CSVLogger name it, or None."""
    match = _RUN_FOLDER.match(folder.name)
    return int(match[1]) if match else None


def step_of(checkpoint: Path) -> int | None:
    """Optimizer steps of a checkpoint ``step-00000100.ckpt``, or None for another name."""
    match = _STEP_FILE.match(plain_name(checkpoint).name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[Path]:
    """Complete checkpoints ``step-*.ckpt`` in `folder`, oldest step first."""
    found = [(int(match[1]), path) for name, path in whole_names(folder).items() if (match := _STEP_FILE.match(name))]
    return [path for _, path in sorted(found)]


def runs_in(runs: Path) -> list[Path]:
    """Directories of runs in `runs`, the newest first.

    Those named ``version_N`` by their number. Only where there are none, those with checkpoints by the time of the
    newest one.
    """
    numbered = [(number, path) for path in runs.glob("*") if (number := run_number(path)) is not None]
    if numbered:
        return [run for _, run in sorted(numbered, reverse=True)]
    return _newest_first(runs.glob(f"*/{CHECKPOINTS}"))


def runs_of_services(save_dir: Path) -> list[Path]:
    """Directories SAVE_DIR/EXPERIMENT/ID with a configuration and checkpoints, the newest checkpoint's first.

    W&B, MLflow and others name runs by random ids.
    """
    folders = _newest_first(save_dir.glob(f"*/*/{CHECKPOINTS}"))
    return [run for run in folders if (run / CONFIG).is_file()]


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    """Runs of folders ``checkpoints``, by their last change."""
    return [one.parent for one in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)]


def search(runs: Iterable[Path], name: str) -> Search:
    """Search runs in their order for "last" or "best", up to the first that has it.

    Args:
        runs: Directories of runs, the newest first: `runs_in`, or the one that is meant.
        name: "last" for the newest step of the newest run that has any, "best" for its best one.

    Checkpoints that are not complete do not count; one that is, but did not get its name before a kill, does.
    """
    kind = _BEST_FILE if name == BEST_NAME else _STEP_FILE
    skipped: list[Path] = []
    for run in runs:
        folder = run / CHECKPOINTS
        skipped += [path for path in leftovers(folder) if kind.match(plain_name(path).name)]
        found = [whole_names(folder).get(f"{BEST_NAME}.ckpt")] if name == BEST_NAME else steps_in(folder)[-1:]
        if found and found[0] is not None:
            return Search(found[0], tuple(skipped))
    return Search(None, tuple(skipped))


def find_checkpoint(runs: Path, name: str) -> Path | None:
    """Path of "last" or "best" among the runs in a directory, or None."""
    return search(runs_in(runs), name).path


def missing(path: Path) -> str:
    """Sentence on what is missing of a path that does not exist: the first folder on the way, or the last part."""
    for part in reversed([path, *path.parents]):
        if not part.exists():
            return f"{path} does not exist" + ("" if part == path else f" (there is no {part})")
    return f"{path} does not exist"
