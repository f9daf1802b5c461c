"""Implementation choices that do NOT change the function. Architecture choices live in the model configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dsv41.config.fields import Flag

AttentionBackend = Literal["sparse", "sdpa", "eager"]
ExpertsBackend = Literal["auto", "loop", "grouped", "dense"]
LossBackend = Literal["chunked", "full"]

FLAGS = (
    "compile_engram",
    "compile_hc",
    "sparse_table_gradient",
    "gradient_checkpointing",
    "strict_validation",
)


@dataclass(frozen=True)
class BackendConfig:
    """Implementations to compute with; all combinations give equal values and gradients up to rounding.

    Args:
        attn: "sparse" reads only the keys that are attended, so that time and memory grow with the length, not with its
            square; "eager" writes the attention out over a dense mask and is the reference; "sdpa" hands the same mask
            to torch's scaled_dot_product_attention.
        experts: "loop" sorts tokens by expert and runs one expert after another; "grouped" runs all of them in one
            grouped matrix product; "auto" is "grouped" in bf16 on CUDA and "loop" elsewhere. "dense" runs every expert
            on every token and is the reference (its result for a token does not even round differently when other
            tokens change).
        loss: "chunked" makes loss and gradients from the logits of a few positions at a time and keeps none, so that
            `logits` is None where labels are given; "full" makes all logits first and returns them beside the loss.
        compile_engram: Run the Engram gate through ``torch.compile`` (`dsv41.ops.engram_gate`).
        compile_hc: Run the mixing of the residual streams through ``torch.compile`` (`dsv41.ops.mixing`).
        sparse_table_gradient: Give Engram tables row-sparse gradients, so that a step allocates nothing of their size.
            For an optimizer that takes them, such as torch's SGD or SparseAdam (AdamW does not). `dsv41 fit` sets it
            by the optimizer's rule for tables.
        gradient_checkpointing: Recompute each block in the backward pass instead of storing its activations.
        strict_validation: Check token and table ids on the host, with readable errors. Off, CUDA inputs are checked
            by device-side asserts instead, which costs no synchronisation. CPU inputs are always checked.

    Raises:
        ValueError: Unknown choice, or a switch that is neither true nor false; names the field and the choices.
    """

    attn: AttentionBackend = "sparse"
    experts: ExpertsBackend = "auto"
    loss: LossBackend = "chunked"
    compile_engram: bool = False
    compile_hc: bool = False
    sparse_table_gradient: bool = False
    gradient_checkpointing: bool = False
    strict_validation: bool = True

    def __post_init__(self) -> None:
        choices_of = {"attn": AttentionBackend, "experts": ExpertsBackend, "loss": LossBackend}
        for field, choices in ((field, get_args(kind)) for field, kind in choices_of.items()):
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}: must be one of {choices}, got {getattr(self, field)!r}")
        for field in FLAGS:
            Flag().check(field, getattr(self, field))
