"""Structure of a checkpoint's plain values, checked before any of them is used.

A checksum says that a file is what was written, not that a run can go on from it: Lightning skips a part that is empty
or missing, and a resumed run then ends elsewhere without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dsv41.config.checks import is_int, is_real
from dsv41.config.fields import shown
from lightning_modules.checkpoint.rule import KEY

_COUNTS = ("ready", "completed", "started", "processed", "_batches_that_stepped")


def require_structure(path: Path, checkpoint: Any, training: bool) -> None:
    """Check the parts of a checkpoint of this project; another's is left to `require_same_function`.

    Args:
        path: Of the checkpoint, for messages.
        checkpoint: Its values; tensors may lie elsewhere.
        training: Whether a run is to go on from it, which takes progress, optimizers and schedules.

    Raises:
        ValueError: A part is missing or of another kind; names path and part.
    """

    def require(condition: bool, part: str, message: str, value: Any) -> None:
        if not condition:
            raise ValueError(f"ckpt_path: {path}: {part}: {message}, got {shown(value)}")

    require(isinstance(checkpoint, dict), "its content", "must be named parts", checkpoint)
    if KEY not in checkpoint:
        return
    for name in ("epoch", "global_step"):
        value = checkpoint.get(name)
        require(is_int(value) and value >= 0, name, "must be an integer of at least 0", value)
    version = checkpoint.get("pytorch-lightning_version")
    valid = isinstance(version, str) and re.match(r"\d+\.\d+\.\d+", version) is not None
    require(valid, "pytorch-lightning_version", "must be a version such as 2.6.0", version)
    own = checkpoint[KEY]
    require(isinstance(own, dict) and isinstance(own.get("text_config"), dict), KEY, "must hold a configuration", own)
    require(is_int(own.get("tokens_seen")), f"{KEY}.tokens_seen", "must be an integer", own.get("tokens_seen"))
    weights = checkpoint.get("state_dict", None if path.is_file() else {})  # a folder's are read later, by the ranks
    named = isinstance(weights, Mapping) and all(isinstance(value, Tensor) for value in weights.values())
    require(named, "state_dict", "must be named tensors", None if named else type(weights).__name__)
    if not training:
        return
    loops = checkpoint.get("loops")
    whole = isinstance(loops, dict) and isinstance(loops.get("fit_loop"), dict) and loops["fit_loop"]
    require(bool(whole), "loops", "must hold the progress of fit_loop", loops)
    _require_counts(require, "loops", loops)
    states = checkpoint.get("optimizer_states")
    require(isinstance(states, list) and len(states) > 0, "optimizer_states", "must be a list of states", states)
    for index, state in enumerate(states or ()):
        _require_optimizer(require, f"optimizer_states[{index}]", state)
    schedules = checkpoint.get("lr_schedulers")
    require(isinstance(schedules, list), "lr_schedulers", "must be a list of states", schedules)
    for index, schedule in enumerate(schedules or ()):
        where = f"lr_schedulers[{index}]"
        require(isinstance(schedule, dict) and len(schedule) > 0, where, "must be the state of a schedule", schedule)
        last = schedule.get("last_epoch", 0)
        require(is_int(last) and last >= 0, f"{where}.last_epoch", "must be an integer of at least 0", last)
        for name in ("base_lrs", "_last_lr"):
            rates = schedule.get(name, [])
            finite = isinstance(rates, list) and all(is_real(rate) for rate in rates)
            require(finite, f"{where}.{name}", "must be a list of numbers", rates)


def _require_counts(require: Any, where: str, value: Any) -> None:
    """Numbers of batches and steps, wherever they stand in the loops' progress."""
    for key, inner in value.items():
        if key in _COUNTS:
            require(is_int(inner) and inner >= 0, f"{where}.{key}", "must be an integer of at least 0", inner)
        elif key in ("total", "current") or str(key).endswith(("_progress", "_loop", "optimizer")):
            require(isinstance(inner, dict) and len(inner) > 0, f"{where}.{key}", "must hold counts", inner)
        elif key == "is_last_batch":
            require(isinstance(inner, bool), f"{where}.{key}", "must be true or false", inner)
        if isinstance(inner, dict):
            _require_counts(require, f"{where}.{key}", inner)


def _require_optimizer(require: Any, where: str, state: Any) -> None:
    """The state of an optimizer: groups, and by parameter named tensors and numbers."""
    require(isinstance(state, dict), where, "must be the state of an optimizer", state)
    groups, values = state.get("param_groups"), state.get("state")
    require(isinstance(groups, list) and len(groups) > 0, f"{where}.param_groups", "must be a list of groups", groups)
    for index, group in enumerate(groups):
        valid = isinstance(group, dict) and isinstance(group.get("params"), list)
        require(valid, f"{where}.param_groups[{index}]", "must hold settings and params", group)
        rate = group.get("lr")
        real = is_real(rate) or isinstance(rate, Tensor)
        require(real, f"{where}.param_groups[{index}].lr", "must be a number", rate)
    require(isinstance(values, dict), f"{where}.state", "must hold the state of parameters", values)
    for name, entries in values.items():
        known = isinstance(entries, dict) and all(
            isinstance(entry, Tensor) or entry is None or isinstance(entry, bool | int | float)
            for entry in entries.values()
        )
        require(known, f"{where}.state[{name!r}]", "must hold named tensors or numbers", entries)
