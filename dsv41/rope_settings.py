"""Rotary settings of a configuration: one description from the names of the release and of transformers 5, checked."""

from __future__ import annotations

from typing import Any

from dsv41.config_checks import is_real, require

RELEASED_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def merged_rope(
    rope_theta: float | None, rope_scaling: dict[str, Any] | None, rope_parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """One YaRN description from the released name, the transformers 5 name, or both with equal content."""
    require(
        rope_theta is None or (is_real(rope_theta) and rope_theta > 0),
        "rope_theta",
        f"must be a number above 0, got {rope_theta!r}",
    )
    explicit = rope_scaling is not None and rope_scaling is not RELEASED_YARN
    chosen = dict(rope_parameters or rope_scaling or {"rope_type": "default"})
    chosen["rope_type"] = chosen.pop("type", chosen.get("rope_type", "default"))
    if explicit and rope_parameters:
        scaling = dict(rope_scaling or {})
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
        for key, value in scaling.items():
            require(
                chosen.get(key) == value,
                "rope_scaling",
                f"{key}={value!r} contradicts rope_parameters, which has {chosen.get(key)!r}",
            )
    theta = chosen.setdefault("rope_theta", 10000.0 if rope_theta is None else rope_theta)
    require(
        rope_theta is None or theta == rope_theta,
        "rope_theta",
        f"{rope_theta!r} contradicts rope_parameters, which has {theta!r}",
    )
    return chosen


def require_rope(rope: dict[str, Any]) -> None:
    """Raise ValueError unless the result of `merged_rope` is a kind that exists, with all that it needs in range."""
    kind = rope["rope_type"]
    require(kind in ("yarn", "default"), "rope_scaling", f"rope_type must be 'yarn' or 'default', got {kind!r}")
    if kind == "yarn":
        for key in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
            require(key in rope, "rope_scaling", f"yarn needs {key!r}")
            require(is_real(rope[key]) and rope[key] > 0, "rope_scaling", f"{key} must be above 0: {rope[key]!r}")
        require(rope["factor"] >= 1, "rope_scaling", f"factor must be at least 1, got {rope['factor']!r}")
