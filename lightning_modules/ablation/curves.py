"""Records of runs: curves from event files, by tensorboard's reader, and settings from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dsv41.weights.folder import read_tokenizer
from lightning_modules.ablation.cost import Cost, cost_of
from lightning_modules.ablation.plan import flat, text_config
from lightning_modules.checkpoint.find import CONFIG
from lightning_modules.transfer.run_record import saved_configuration, seed_of

LOSS = "val/loss"
TRAIN_LOSS = "train/loss"
RATE = "train/tokens_per_sec"
MEMORY = "train/peak_memory_mb"


class NoLossError(ValueError):
    """A directory of event files without a validation loss: no run, or one that was refused or ended before it."""


@dataclass(frozen=True)
class Record:
    """Record of one run.

    Attributes:
        variant: Name.
        seed: Seed; None if its configuration has none.
        directory: Of its event files.
        curve: Validation loss by steps done, in nats per token.
        train_curve: Training loss by steps done.
        rate: Median of its tokens per second; None if none was logged.
        memory: Peak of rank 0 in MB; None if none was logged.
        cost: None without a configuration and tokenizer.
        settings: All options by their dotted name; empty without a configuration.
    """

    variant: str
    seed: int | None
    directory: Path
    curve: dict[int, float]
    train_curve: dict[int, float]
    rate: float | None
    memory: float | None
    cost: Cost | None
    settings: dict[str, Any]

    @property
    def steps(self) -> int:
        """Steps done at the last validation."""
        return max(self.curve)

    @property
    def loss(self) -> float:
        """Validation loss of the last validation."""
        return self.curve[self.steps]


def scalars(directory: Path) -> dict[str, list[Any]]:
    """Every scalar of a directory's event files: tensorboard's events (wall_time, step, value) by tag."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: reader.Scalars(tag) for tag in reader.Tags()["scalars"]}


def run_directories(path: Path) -> list[Path]:
    """Directories in or below `path` that a training has written event files to.

    Raises:
        FileNotFoundError: There is none.
    """
    found = sorted({file.parent for file in path.rglob("events.out.tfevents.*")}) if path.is_dir() else []
    found = [folder for folder in found if (_home(folder) / CONFIG).is_file() or folder == path] or found
    if not found:
        raise FileNotFoundError(f"{path}: no event files of TensorBoard here or in a folder below")
    return found


def _home(events: Path) -> Path:
    """Directory of the run that event files belong to: their own, or with a logger's sub_dir the one above it."""
    return next((folder for folder in (events, events.parent) if (folder / CONFIG).is_file()), events)


def name_of(directory: Path) -> str:
    """Experiment's name: the last folder that is no ``version_N`` or ``seed_N``."""
    for folder in (directory.absolute(), *directory.absolute().parents):
        kind, _, number = folder.name.partition("_")
        if not (kind in ("version", "seed") and number.isdecimal()):
            return folder.name
    return directory.name


def _cost(directory: Path, config: dict[str, Any]) -> Cost | None:
    if "model" not in config or "data" not in config:
        return None
    vocabulary = config["model"]["config"].get("vocab_size")
    if vocabulary is None:
        tokenizer = read_tokenizer(directory / "tokenizer")
        if tokenizer is None:
            return None
        vocabulary = len(tokenizer)
    return cost_of(text_config(config, vocabulary), config["data"]["sequence_length"])


def read_run(directory: Path, variant: str | None = None) -> Record:
    """Read one run.

    Args:
        directory: With event files, and where this project has written them ``config.yaml`` and ``tokenizer``.
        variant: Its name; None takes `name_of`.

    Raises:
        NoLossError: It has no validation loss.
    """
    found = scalars(directory)
    if not found.get(LOSS):
        raise NoLossError(f"{directory}: has no {LOSS}, so there is nothing to compare")
    home = _home(directory)
    config = saved_configuration(home)
    rates = [event.value for event in found.get(RATE, [])]
    peaks = [event.value for event in found.get(MEMORY, [])]
    return Record(
        variant=variant or name_of(home),
        seed=seed_of(config),
        directory=directory,
        # Lightning logs under the number of the step, from 0, here it is the steps done.
        curve={event.step + 1: event.value for event in found[LOSS]},
        train_curve={event.step + 1: event.value for event in found.get(TRAIN_LOSS, [])},
        rate=median(rates) if rates else None,
        memory=max(peaks) if peaks else None,
        cost=_cost(home, config),
        settings=flat(config) if config else {},
    )
