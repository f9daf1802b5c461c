"""Keys and types of a checkpoint, compared before anything is restored from it.

Lightning takes a missing or empty entry for one that was never saved and resumes without it: from step 0, say, or with
moments of zero. Checksums do not help where somebody has edited the file and saved it again.

Evaluation and export need the weights and what says whose they are; only a resumed training needs the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from torch import Tensor

VERSION = "pytorch-lightning_version"
TRAINING_KEYS = ("loops", "optimizer_states", "lr_schedulers")
# State of a parameter, by the rule of its group.
STATE_KEYS = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
    "rows": ("exp_avg", "exp_avg_sq", "hits"),
}
_MISSING = object()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _refuse(file: Path, key: str, must: str, value: Any) -> ValueError:
    if value is _MISSING:
        return ValueError(f"ckpt_path: {file}: {key} is missing; it must be {must}")
    plain = isinstance(value, int | float | str | None) or (isinstance(value, dict | list | tuple) and not value)
    shown = repr(value) if plain else f"a {type(value).__name__}"
    return ValueError(f"ckpt_path: {file}: {key} must be {must}, got {shown[:80]}")


def _typed(file: Path, values: Any, name: str, kind: type, must: str, prefix: str = "") -> Any:
    """`values[name]`, which has to be of a type."""
    value = values.get(name, _MISSING)
    if not isinstance(value, kind):
        raise _refuse(file, f"{prefix}{name}", must, value)
    return value


def _count(file: Path, values: Mapping[str, Any], name: str, prefix: str = "") -> None:
    value = values.get(name, _MISSING)
    if not _is_count(value):
        raise _refuse(file, f"{prefix}{name}", "an integer of at least 0", value)


def require_version(file: Path, checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint says by which Lightning it was written, one that needs no migration."""
    value = checkpoint.get(VERSION, _MISSING)
    try:
        sound = isinstance(value, str) and Version(value) >= Version("2")
    except InvalidVersion:
        sound = False
    if not sound:
        raise _refuse(file, VERSION, "a version of Lightning, 2.0 or later", value)


def require_weights(file: Path, checkpoint: Mapping[str, Any], key: str, with_tensors: bool) -> None:
    """Check what any use of a checkpoint reads.

    Args:
        file: For the error.
        checkpoint: Its content.
        key: Of the task's own entry; whether there has to be one is the caller's to say.
        with_tensors: Whether `state_dict` is in here; that of a folder is in files of their own.

    Raises:
        ValueError: A key is missing or of another type; names file and key.
    """
    if with_tensors:
        for name, tensor in _typed(file, checkpoint, "state_dict", dict, "a dictionary of tensors").items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise _refuse(file, f"state_dict.{name}", "a tensor", tensor)
    if key in checkpoint:
        about = _typed(file, checkpoint, key, dict, "a dictionary")
        _typed(file, about, "text_config", dict, "a dictionary of the architecture's fields", f"{key}.")
        _count(file, about, "tokens_seen", f"{key}.")
        metrics = _typed(file, {"metrics": {}} | about, "metrics", dict, "a dictionary of numbers", f"{key}.")
        for name, number in metrics.items():
            if not _is_number(number):
                raise _refuse(file, f"{key}.metrics.{name}", "a number", number)
    for name in ("hyper_parameters", "callbacks"):
        if name in checkpoint:
            _typed(file, checkpoint, name, dict, "a dictionary")
    for name, state in checkpoint.get("callbacks", {}).items():
        if not isinstance(state, dict):
            raise _refuse(file, f"callbacks.{name}", "a dictionary", state)


def _require_like(file: Path, found: Any, expected: Any, key: str) -> None:
    """Raise ValueError unless `found` has everything that `expected` has, in the same types; counts are at least 0."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            raise _refuse(file, key, "a dictionary", found)
        for name, value in expected.items():
            _require_like(file, found.get(name, _MISSING), value, f"{key}.{name}")
    elif isinstance(expected, bool):
        if not isinstance(found, bool):
            raise _refuse(file, key, "true or false", found)
    elif isinstance(expected, int) and not _is_count(found):
        raise _refuse(file, key, "an integer of at least 0", found)


def require_optimizers(file: Path, states: Any) -> None:
    """Raise ValueError unless `states` are a list of optimizer states, as far as keys and types go."""
    if not isinstance(states, list) or not states:
        raise _refuse(file, "optimizer_states", "a list with a state for each optimizer", states)
    for index, optimizer in enumerate(states):
        key = f"optimizer_states.{index}"
        if not isinstance(optimizer, dict):
            raise _refuse(file, key, "a dictionary", optimizer)
        groups = _typed(file, optimizer, "param_groups", list, "a list of groups", f"{key}.")
        members: set[Any] = set()
        for number, group in enumerate(groups):
            place = f"{key}.param_groups.{number}"
            if not isinstance(group, dict):
                raise _refuse(file, place, "a dictionary", group)
            if "rule" in group:
                _typed(file, group, "rule", str, "a text", f"{place}.")
            for member in _typed(file, group, "params", list, "a list of parameters", f"{place}."):
                if not isinstance(member, str) and not _is_count(member):
                    raise _refuse(file, f"{place}.params", "a list of numbers or names", member)
                members.add(member)
        for member, entry in _typed(file, optimizer, "state", dict, "a dictionary", f"{key}.").items():
            if not isinstance(entry, dict):
                raise _refuse(file, f"{key}.state.{member}", "a dictionary", entry)
            if member not in members:
                raise ValueError(f"ckpt_path: {file}: {key}.state.{member} belongs to no group of parameters")


def require_moments(file: Path, states: list[dict[str, Any]], global_step: int) -> None:
    """Raise ValueError if an optimizer that has made steps remembers nothing, or lacks what its rules keep.

    Args:
        file: For the error.
        states: Complete states, tensors included, that `require_optimizers` has seen.
        global_step: Steps that were made.
    """
    for index, optimizer in enumerate(states):
        key = f"optimizer_states.{index}.state"
        # Plain SGD, say, has none; parameters that never had a gradient neither.
        keeps = any(group["params"] and group.get("rule") in STATE_KEYS for group in optimizer["param_groups"])
        if global_step > 0 and keeps and not optimizer["state"]:
            raise _refuse(file, key, f"that of an optimizer after {global_step} steps", optimizer["state"])
        for group in optimizer["param_groups"]:
            for member in group["params"]:
                entry = optimizer["state"].get(member)
                for name in STATE_KEYS.get(group.get("rule"), ()) if entry is not None else ():
                    if not isinstance(entry.get(name), Tensor):
                        raise _refuse(file, f"{key}.{member}.{name}", "a tensor", entry.get(name, _MISSING))


def _require_groups(file: Path, stored: list[dict[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless groups that learn by the same rule have settings of the same names and types.

    torch takes the groups as they are stored. Their number and rules are compared where they are restored.
    """
    for number, (theirs, ours) in enumerate(zip(stored, own, strict=False)):
        if theirs.get("rule") != ours.get("rule"):
            continue
        for name, value in ours.items():
            key, found = f"optimizer_states.0.param_groups.{number}.{name}", theirs.get(name, _MISSING)
            if found is _MISSING:
                raise _refuse(file, key, f"such as {value!r}", found)
            if isinstance(value, str) and not isinstance(found, str):
                raise _refuse(file, key, "a text", found)
            if _is_number(value) and not _is_number(found):
                raise _refuse(file, key, "a number", found)
            if isinstance(value, tuple) and not (
                isinstance(found, tuple | list) and len(found) == len(value) and all(map(_is_number, found))
            ):
                raise _refuse(file, key, f"{len(value)} numbers", found)


def _require_schedule(file: Path, state: Any, groups: int) -> None:
    """Raise ValueError unless `state` is that of a `LambdaLR` over so many groups."""
    key = "lr_schedulers.0"
    if not isinstance(state, dict):
        raise _refuse(file, key, "a dictionary", state)
    _count(file, state, "last_epoch", f"{key}.")
    _typed(file, state, "lr_lambdas", list, "a list", f"{key}.")
    for name in ("base_lrs", "_last_lr"):
        rates = _typed(file, state, name, list, f"a list of {groups} numbers", f"{key}.")
        if len(rates) != groups or not all(map(_is_number, rates)):
            raise _refuse(file, f"{key}.{name}", f"a list of {groups} numbers", rates)


def require_training(
    file: Path,
    checkpoint: Mapping[str, Any],
    loops: dict[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
    data: str | None,
    complete: bool,
) -> None:
    """Check what a training is resumed from.

    Args:
        file: For the error.
        checkpoint: Its content.
        loops: ``trainer.fit_loop.state_dict()``, which says what a checkpoint has to have of it.
        groups: Parameter groups of the one optimizer, which has one `LambdaLR`; None if the task has others, of which
            only lists are asked.
        data: Class of the data module, under whose name its state is; None without.
        complete: Whether tensors of the optimizers are in here; those of a folder are in files of their own.

    Raises:
        ValueError: A key is missing or of another type; names file and key.
    """
    for name in ("epoch", "global_step"):
        _count(file, checkpoint, name)
    _typed(file, checkpoint, "callbacks", dict, "a dictionary")
    if data is not None and data in checkpoint:
        _typed(file, checkpoint, data, dict, "a dictionary")
    stored = _typed(file, checkpoint, "loops", dict, "a dictionary")
    # Of the loaders there may be other ones now, which is checked where their states are loaded.
    own = {name: {} if name == "state_dict" else value for name, value in loops.items()}
    _require_like(file, stored.get("fit_loop", _MISSING), own, "loops.fit_loop")
    states = checkpoint.get("optimizer_states", _MISSING)
    require_optimizers(file, states)
    if complete:
        require_moments(file, states, checkpoint["global_step"])
    schedules = _typed(file, checkpoint, "lr_schedulers", list, "a list with a state for each schedule")
    if groups is None:
        return
    for name, entries in (("optimizer_states", states), ("lr_schedulers", schedules)):
        if len(entries) != 1:
            raise _refuse(file, name, "a list of one state", entries or [])
    _require_groups(file, states[0]["param_groups"], groups)
    _require_schedule(file, schedules[0], len(states[0]["param_groups"]))
