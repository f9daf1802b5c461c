"""Checks of configurations whose errors begin with the name of the field, before work starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import torch


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {message}")


def reject_misspelt(kwargs: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Raise if an unknown key is so close to a known field that it can only be a misspelling of it."""
    known = list(known)
    for key in kwargs:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if close and key not in known:
            raise ValueError(f"{key}: {owner} has no such field; did you mean {close[0]!r}?")


# Architectures that are easily mistaken for V4.1, with the reason why they are not.
_OTHER_ARCHITECTURES = {
    "deepseek_v4": "V4 compresses keys and selects positions in each layer for itself, has heavily compressed layers "
    "and layers that choose experts by token id",
    "deepseek_v32": "V3.2 has multi-head latent attention with an indexer in each layer, and one residual stream",
    "deepseek_v3": "V3 has multi-head latent attention over all positions, and one residual stream",
}


def refuse_other_model(found: Any, expected: str) -> None:
    """Raise unless the `model_type` of a file or dictionary is `expected`: fields of equal names differ in meaning."""
    if found == expected:
        return
    described = _OTHER_ARCHITECTURES.get(str(found).removesuffix("_text"))
    reason = "" if described is None else f". {described}"
    raise ValueError(
        f"model_type: must be {expected!r}, got {found!r}{reason}. V4.1 shares compressed keys and selections between "
        "layers (CSA2), mixes residual streams in a single pass (mHC) and has Engram memories; a configuration of "
        "another model does not describe it"
    )


def require_dtypes(given: dict[str, Any]) -> None:
    """Raise ValueError for a name that is no dtype, where the base class raises an AttributeError of torch."""
    for name in ("dtype", "torch_dtype"):
        value = given.get(name)
        named = getattr(torch, value, None) if isinstance(value, str) else value
        valid = value is None or isinstance(named, torch.dtype)
        require(valid, name, f"must be a dtype of torch, such as 'bfloat16', got {value!r}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value)
