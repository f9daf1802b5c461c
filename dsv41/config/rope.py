"""Rotary settings of a configuration: one description from the names of the release and of transformers 5, checked."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from dsv41.config.checks import require
from dsv41.config.fields import POSITIONS, TEXT_RULES, Real, Rule, Whole, shown

# Values as given: numbers and the name of a kind.
RopeSettings = dict[str, int | float | str]

RELEASED_YARN: RopeSettings = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}

_YARN_RULES: dict[str, Rule] = {
    "factor": Real(1, 1e6),
    "beta_fast": Real(0, 1e6, above=True),
    "beta_slow": Real(0, 1e6, above=True),
    "original_max_position_embeddings": Whole(1, POSITIONS),
}
# Keys of each kind; the base may stand among them.
_KEYS = {"default": {"rope_type", "rope_theta"}, "yarn": {"rope_type", "rope_theta", *_YARN_RULES}}


def _settings(field: str, given: Any) -> dict[str, Any] | None:
    """Copy of the settings under `field`, with "type", the older name of "rope_type", replaced."""
    require(given is None or isinstance(given, dict), field, f"must be a group of settings or null, got {shown(given)}")
    if given is None:
        return None
    found = dict(given)
    if "type" in found:
        kind = found.pop("type")
        require(
            found.setdefault("rope_type", kind) == kind,
            field,
            f"type={shown(kind)} contradicts rope_type={shown(found['rope_type'])}",
        )
    _require_known(found, field)
    return found


def _require_known(rope: dict[str, Any], field: str) -> None:
    for key, value in rope.items():
        require(
            not isinstance(value, dict),
            field,
            f"{shown(key)} holds a group; settings by layer type are another model's, here compressed layers have them",
        )
    known = {*_KEYS["yarn"], "type"}
    for key in sorted(rope.keys() - known, key=str):
        near = get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(sorted(_KEYS['yarn']))}"
        raise ValueError(f"{field}: there is no setting {shown(key)}; {hint}")


def merged_rope(rope_theta: Any, rope_scaling: Any, rope_parameters: Any) -> dict[str, Any]:
    """YaRN settings from the released name, the transformers 5 name, or both with equal content.

    Raises:
        ValueError: Not a group of known settings in their ranges, or contradicting ones; begins with the field's name.
    """
    if rope_theta is not None:
        TEXT_RULES["rope_theta"].check("rope_theta", rope_theta)
    explicit = rope_scaling is not None and rope_scaling is not RELEASED_YARN
    scaling, parameters = _settings("rope_scaling", rope_scaling), _settings("rope_parameters", rope_parameters)
    if scaling is not None and parameters is not None and explicit:
        for key, value in scaling.items():
            require(
                key in parameters and parameters[key] == value,
                "rope_scaling",
                f"{key}={shown(value)} contradicts rope_parameters, which has {shown(parameters.get(key))}",
            )
        require_rope(scaling, "rope_scaling")
    if parameters is not None:
        require_rope(parameters, "rope_parameters")
    elif scaling is not None:
        require_rope(scaling, "rope_scaling")
    chosen = parameters or scaling or {"rope_type": "default"}
    theta = chosen.setdefault("rope_theta", 10000.0 if rope_theta is None else rope_theta)
    require(
        rope_theta is None or theta == rope_theta,
        "rope_theta",
        f"{rope_theta!r} contradicts rope_parameters, which has {theta!r}",
    )
    return chosen


def require_rope(rope: dict[str, Any], field: str = "rope_scaling") -> None:
    """Check rotary settings whose kind is under "rope_type".

    Args:
        rope: The settings.
        field: Name of the field for messages.

    Raises:
        ValueError: The kind is missing or unknown, a setting is missing, unknown or out of its range; begins with the
            field's name.
    """
    _require_known(rope, field)
    require("rope_type" in rope, field, "rope_type is missing; it must be 'yarn' or 'default'")
    kind = rope["rope_type"]
    near = get_close_matches(str(kind), _KEYS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    require(
        isinstance(kind, str) and kind in _KEYS,
        field,
        f"rope_type must be 'yarn' or 'default', got {shown(kind)}{hint}",
    )
    for key in sorted(rope.keys() - _KEYS[kind]):
        raise ValueError(f"{field}: {key} has no effect with rope_type {kind!r}")
    if kind == "yarn":
        for key, rule in _YARN_RULES.items():
            require(key in rope, field, f"yarn needs {key!r}")
            _check_within(field, key, rule, rope[key])
    if "rope_theta" in rope:
        _check_within(field, "rope_theta", TEXT_RULES["rope_theta"], rope["rope_theta"])


def _check_within(field: str, key: str, rule: Rule, value: Any) -> None:
    try:
        rule.check(key, value)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
