"""Ranges of every number that a configuration can hold, by the option's full name, checked before anything is built.

Those of the model's configuration, the optimizer, the schedule and the backend are their own tables; those of the
trainer, of Lightning's parts and of this project's callbacks are here. The data module checks its options itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from jsonargparse import Namespace

from dsv41.backend import FLAGS as BACKEND_FLAGS
from dsv41.config.checks import is_int, is_real, require
from dsv41.config.fields import POSITIONS, TEXT_RULES, Flag, Real, Whole, shown
from lightning_modules.optim.groups import RULES as OPTIMIZER_RULES
from lightning_modules.optim.schedule import RULES as SCHEDULE_RULES

_LONGEST_TIME = timedelta(days=36_500)
_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


class Checked(Protocol):
    """A rule of one option's values."""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""


@dataclass(frozen=True)
class Or:
    """A rule's values, or one of some others, such as -1 or null; `meaning` says what the others stand for."""

    rule: Checked
    others: tuple[Any, ...]
    meaning: str

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        if any(value is other or (type(value) is type(other) and value == other) for other in self.others):
            return
        try:
            self.rule.check(field, value)
        except ValueError as error:
            told, got, rest = str(error).rpartition(", got ")
            raise ValueError(f"{told}, or {self.meaning}{got}{rest}") from None


@dataclass(frozen=True)
class Batches:
    """Numbers of batches from `low`, or shares of them: an integer counts, 1.0 is all of them."""

    low: int = 0

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        counts = is_int(value) and self.low <= value <= POSITIONS
        share = isinstance(value, float) and is_real(value) and (0 < value <= 1 or (value == 0 and self.low == 0))
        first = "from 0" if self.low == 0 else "above 0"
        require(
            counts or share,
            field,
            f"must be a number of batches, an integer of at least {self.low}, or a share, {first} to 1.0, got "
            f"{shown(value)}",
        )


@dataclass(frozen=True)
class Duration:
    """Times: DD:HH:MM:SS, or units and their numbers; longer than nothing, at most a century."""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        require(
            timedelta() < (duration(value) or timedelta()) <= _LONGEST_TIME,
            field,
            f"must be a time above 0 such as 00:12:00:00 (days:hours:minutes:seconds) or {{hours: 12}}, at most "
            f"{_LONGEST_TIME.days} days, got {shown(value)}",
        )


def duration(value: Any) -> timedelta | None:
    """The time that an option of Lightning stands for, or None for anything else."""
    parts: dict[str, Any]
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}(:\d{1,6}){3}", value, re.ASCII):
        parts = dict(zip(("days", "hours", "minutes", "seconds"), map(int, value.split(":")), strict=True))
    elif isinstance(value, dict) and value and all(unit in _UNITS for unit in value):
        parts = value
    else:
        return None
    small = all(is_int(number) and 0 <= number < 10**12 for number in parts.values())
    try:
        return timedelta(**parts) if small else None
    except OverflowError:
        return None


@dataclass(frozen=True)
class Interval:
    """Batches between validations, a share of an epoch, or a time."""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        if duration(value) is not None:
            Duration().check(field, value)
            return
        valid = (is_int(value) and 1 <= value <= POSITIONS) or (
            isinstance(value, float) and is_real(value) and 0 < value <= 1
        )
        require(
            valid,
            field,
            "must be a number of batches, an integer of at least 1, a share of an epoch, above 0 to 1.0, or a time "
            f"such as 00:01:00:00, got {shown(value)}",
        )


@dataclass(frozen=True)
class Devices:
    """How many devices, or which."""

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        if isinstance(value, str):
            valid = re.fullmatch(r"auto|-1|0*[1-9]\d{0,5}|\d{1,6}(\s*,\s*\d{1,6})+|\d{1,6},", value) is not None
        elif isinstance(value, list):
            different = 0 < len(value) == len(set(map(repr, value)))
            valid = different and all(is_int(one) and 0 <= one < 10**6 for one in value)
        else:
            valid = is_int(value) and (value == -1 or 0 < value < 10**6)
        require(
            valid,
            field,
            f"must be at least 1, -1 or auto for all, or a list of different device numbers, got {shown(value)}",
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One of a few texts, or null."""

    texts: tuple[str, ...]

    def check(self, field: str, value: Any) -> None:
        """Raise ValueError that begins with `field`."""
        require(
            value is None or value in self.texts,
            field,
            f"must be one of {', '.join(self.texts)} or null, got {shown(value)}",
        )


_NULL = (None,)
_COUNT = Whole(0, POSITIONS)
_POSITIVE = Whole(1, POSITIONS)
_SOME_BATCHES = Or(Batches(), _NULL, "null for all")

TRAINER_RULES: dict[str, Checked] = {
    "devices": Devices(),
    "num_nodes": Whole(1, 2**16),
    "fast_dev_run": Or(_COUNT, (True, False), "true or false"),
    "max_epochs": Or(Whole(-1, POSITIONS), _NULL, "null for max_steps alone, -1 for no end"),
    "min_epochs": Or(_COUNT, _NULL, "null for none"),
    "max_steps": Whole(-1, POSITIONS),
    "min_steps": Or(_COUNT, _NULL, "null for none"),
    "max_time": Or(Duration(), _NULL, "null for none"),
    "limit_train_batches": _SOME_BATCHES,
    "limit_val_batches": _SOME_BATCHES,
    "limit_test_batches": _SOME_BATCHES,
    "limit_predict_batches": _SOME_BATCHES,
    "overfit_batches": Batches(),
    "val_check_interval": Or(Interval(), _NULL, "null for once an epoch"),
    "check_val_every_n_epoch": Or(_POSITIVE, _NULL, "null to count batches over epochs"),
    "num_sanity_val_steps": Or(Whole(-1, POSITIONS), _NULL, "null for 2, -1 for all"),
    "log_every_n_steps": Or(_POSITIVE, _NULL, "null for 50; --trainer.logger false logs nothing"),
    "accumulate_grad_batches": _POSITIVE,
    "gradient_clip_val": Or(Real(0, 1e12), _NULL, "null for no clipping"),
    "gradient_clip_algorithm": Choice(("norm", "value")),
    "reload_dataloaders_every_n_epochs": _COUNT,
}

OWN_RULES: dict[str, Checked] = {
    "seed_everything": Or(Whole(0, 2**32 - 1), (True, False), "true for a random one, false for none"),
    "model.indexer.warmup_steps": _COUNT,
    "checkpoint.every_n_steps": _POSITIVE,
    "checkpoint.keep": Or(_POSITIVE, (-1,), "-1 for all"),
    "update_ratio.every_n_steps": _COUNT,
    "indexer_recall.batches": _COUNT,
    "engram_gates.batches": _COUNT,
    "engram_gates.tokens": Whole(1, 4096),
    "engram_memory.batches": _COUNT,
    "stream_mixers.batches": _COUNT,
    "expert_load.batches": _COUNT,
}

RULES: dict[str, Checked] = (
    OWN_RULES
    | {f"trainer.{name}": rule for name, rule in TRAINER_RULES.items()}
    | {f"model.config.{name}": rule for name, rule in TEXT_RULES.items()}
    | {f"model.optimizer.{name}": rule for name, rule in OPTIMIZER_RULES.items()}
    | {f"model.schedule.{name}": rule for name, rule in SCHEDULE_RULES.items()}
    | {f"model.backend.{name}": Flag() for name in BACKEND_FLAGS}
    | {"model.config.rope_theta": Or(TEXT_RULES["rope_theta"], _NULL, "null for the one in rope_scaling")}
)

# Numbers of Lightning's parts and of the strategy, by the class's name; what is not here is finite at least.
PART_RULES: dict[str, dict[str, Checked]] = {
    "EarlyStopping": {
        "patience": _COUNT,
        "min_delta": Real(-1e12, 1e12),
        "mode": Choice(("min", "max")),
    },
    "ModelCheckpoint": {
        "save_top_k": Whole(-1, POSITIONS),
        "every_n_train_steps": Or(_COUNT, _NULL, "null for none"),
        "every_n_epochs": Or(_COUNT, _NULL, "null for none"),
        "train_time_interval": Or(Duration(), _NULL, "null for none"),
        "mode": Choice(("min", "max")),
    },
    "Timer": {"duration": Or(Duration(), _NULL, "null for none")},
    "TQDMProgressBar": {"refresh_rate": _COUNT},
    "RichProgressBar": {"refresh_rate": _COUNT},
    "DeviceStatsMonitor": {"cpu_stats": Flag(null=True)},
    "TensorBoardLogger": {"version": Or(_COUNT, _NULL, "a text, or null for the next")},
    "CSVLogger": {"version": Or(_COUNT, _NULL, "a text, or null for the next"), "flush_logs_every_n_steps": _POSITIVE},
    "EngramFSDPStrategy": {
        "tensor_parallel_size": Whole(1, 1),
        "timeout": Or(Duration(), _NULL, "null for torch's"),
    },
}


def require_ranges(config: Namespace) -> None:
    """Check every number of a parsed configuration, nothing of it built yet.

    Args:
        config: Of a subcommand.

    Raises:
        ValueError: A value is out of its range; begins with the option and gives the range.
    """
    for option, rule in RULES.items():
        if option in config:
            rule.check(option, config[option])
    for option, part, arguments in _parts(config, ""):
        rules = PART_RULES.get(part, {})
        for name, value in arguments.items():
            where = f"{option}.init_args.{name}"
            if name in rules and not (name == "version" and isinstance(value, str)):
                rules[name].check(where, value)
            _require_number(where, value)


def _parts(value: Any, option: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Option, class name and arguments of every part that is named by a class path."""
    if isinstance(value, Namespace | dict):
        entries = vars(value) if isinstance(value, Namespace) else value
        path, arguments = entries.get("class_path"), entries.get("init_args")
        if isinstance(path, str) and arguments is not None:
            found = vars(arguments) if isinstance(arguments, Namespace) else arguments
            yield option, path.rpartition(".")[2], found
        for name, inner in entries.items():
            yield from _parts(inner, f"{option}.{name}" if option else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _parts(inner, f"{option}[{index}]")


def _require_number(option: str, value: Any) -> None:
    """Refuse NaN and what has no 64 bits, wherever they stand."""
    if isinstance(value, float):
        require(not math.isnan(value), option, "must be a number, got nan")
    elif is_int(value):
        require(-(2**63) <= value < 2**63, option, f"must fit into 64 bits, got {shown(value)}")
    elif isinstance(value, list):
        for inner in value:
            _require_number(option, inner)
    elif isinstance(value, dict):
        for inner in value.values():
            _require_number(option, inner)
