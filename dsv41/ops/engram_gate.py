"""Gate of the Engram memory: read for every stream, added to it (ARCHITECTURE 6).

    dot_c  = < norm(h_c) * q_w_c , norm(key_c) * k_w_c > / sqrt(H)
    gate_c = sigmoid(sign(dot_c) * sqrt(max(|dot_c|, 1e-6)))
    h_c   += gate_c * value

Shapes: B batch, S sequence, C streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv41.ops.compiled import CompiledCore
from dsv41.ops.precision import widen


def engram_gates(streams: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Gates of the memory, per token and stream, as the core computes them; for inspection.

    Args:
        streams: [B, S, C, H], at least fp32.
        key: [B, S, C * H].
        q_weight: Norm weight of the streams [C, H].
        k_weight: Norm weight of the keys [C, H].
        eps: RMS epsilon.

    Returns:
        [B, S, C] in (0, 1) and in the dtype of `streams`, of every token, also those that the core masks.
    """
    keys = widen(key).unflatten(-1, streams.shape[-2:])
    rstd_h = torch.rsqrt(streams.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(keys.square().mean(-1) + eps)
    weight = q_weight.to(streams.dtype) * k_weight.to(streams.dtype)
    dot = (streams * weight * keys).sum(-1) * rstd_h * rstd_k * streams.shape[-1] ** -0.5
    return torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())


def gate_memory(
    hidden_states: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    token_mask: Tensor | None,
) -> Tensor:
    """Gate the memory value and add it to the streams.

    Args:
        hidden_states: Streams [B, S, C, H].
        key: [B, S, C * H].
        value: [B, S, H].
        q_weight: Norm weight of the streams [C, H].
        k_weight: Norm weight of the keys [C, H].
        eps: RMS epsilon.
        token_mask: Bool [B, S]; a false token keeps its streams unchanged. None is all true.

    Returns:
        [B, S, C, H] in the dtype of `hidden_states`; arithmetic at least fp32.
    """
    streams = widen(hidden_states)
    gate = engram_gates(streams, key, q_weight, k_weight, eps)
    if token_mask is not None:
        gate = gate * token_mask.unsqueeze(-1)
    return (streams + gate.unsqueeze(-1) * widen(value).unsqueeze(-2)).to(hidden_states.dtype)


GateCore = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor | None], Tensor]

IMPLEMENTATIONS: dict[str, GateCore] = {
    "eager": gate_memory,
    "compiled": CompiledCore("Engram gate", gate_memory),
}
