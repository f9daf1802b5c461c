"""Implementation choices that do NOT change the function. Architecture choices live in the model configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttentionBackend = Literal["sparse", "sdpa", "eager"]
ExpertsBackend = Literal["loop", "dense"]


@dataclass(frozen=True)
class BackendConfig:
    """How to compute; every combination gives the same values and gradients up to rounding.

    Args:
        attn: "sparse" reads only the keys that are attended, so that time and memory grow with the length, not with its
            square; "eager" writes the attention out over a dense mask and is the reference; "sdpa" hands the same mask
            to torch's scaled_dot_product_attention.
        experts: "loop" runs each expert on its own tokens; "dense" runs every expert on every token and is the
            reference (its result for a token does not even round differently when other tokens change).
        compile_engram: Run the Engram gate through `dsv41.engram.compile_engram_gate` (whole process).
        gradient_checkpointing: Recompute each block in the backward pass instead of storing its activations.
        strict_validation: Check token and table ids on the host, with readable errors. Off, CUDA inputs are checked
            by device-side asserts instead, which costs no synchronisation. CPU inputs are always checked.

    Raises:
        ValueError: Unknown choice; names the field and the choices.
    """

    attn: AttentionBackend = "sparse"
    experts: ExpertsBackend = "loop"
    compile_engram: bool = False
    gradient_checkpointing: bool = False
    strict_validation: bool = True

    def __post_init__(self) -> None:
        for field, choices in (("attn", get_args(AttentionBackend)), ("experts", get_args(ExpertsBackend))):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}: must be one of {choices}, got {getattr(self, field)!r}")
