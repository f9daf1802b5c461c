"""What has to stay fp32 is fp32 when training begins, whatever has happened to the model before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv41.model import DeepseekV41ForCausalLM
from dsv41.moe import Router
from lightning_modules.listing import first_few


def _wide(model: DeepseekV41ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter) for name, parameter in model.named_parameters() if model.stays_fp32(name))
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield from ((f"{name}.{leaf}", getattr(module, leaf)) for leaf in ("bias", "bias_vl"))


def require_wide_parameters(model: DeepseekV41ForCausalLM) -> None:
    """Raise unless what has to stay fp32 (ARCHITECTURE 9) is stored in fp32, or in float64.

    These are mixing coefficients, sinks, pooling weights, the head, and the routers' biases. A cast of the whole model
    (``model.bfloat16()``) narrows them without a word; training would go on with coefficients of three digits.

    Args:
        model: Whole or sharded; nothing is communicated, and every rank finds the same.

    Raises:
        ValueError: Names the first few that are narrower, with their dtype.
    """
    narrow = [f"{n} ({t.dtype})" for n, t in _wide(model) if t.dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise ValueError(
            f"parameters and buffers that have to stay fp32: {first_few(narrow)}; cast with "
            "model.cast_parameters(dtype), which leaves them out, or train with trainer.precision bf16-mixed"
        )
