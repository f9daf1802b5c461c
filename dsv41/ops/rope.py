"""Rotary position embedding (ARCHITECTURE 4): adjacent channel pairs as complex numbers, YaRN on frequencies only.

There are two kinds of layers. Ratio 0 rotates with `rope_theta` and no scaling; compressed layers rotate with
`compress_rope_theta` and YaRN, without its attention-scale factor. The last `qk_rope_head_dim` channels rotate.

Nothing is stored on a module: a float buffer would be ruined by a cast to bf16, and the table is cheap to make.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.config import DeepseekV41TextConfig
from dsv41.ops.precision import widen

# Rows of a multiple of this many pairs are rotated where they are. In others, torch's complex product would round what
# remains behind each row's whole vectors in its own way: they are copied together first, which leaves one remainder.
WHOLE_VECTORS = 16


def yarn_frequencies(width: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Angular frequencies of the channel pairs, in radians per position.

    Args:
        width: Number of rotating channels (even).
        theta: Rotary base.
        scaling: YaRN settings, or None for plain frequencies. A pair that turns at least `beta_fast` times within the
            original length keeps its frequency, one that turns at most `beta_slow` times is slowed by `factor`, and
            a linear ramp over the pair index lies between (YaRN, arXiv:2309.00071, section 3.2).

    Returns:
        fp32 tensor [width / 2] on the CPU.
    """
    # On the CPU even inside a meta-device context: a table of frequencies is a constant, not a parameter.
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / theta ** (pairs / width)
    if scaling is None or scaling["rope_type"] == "default":
        return frequencies

    def pair_that_turns(rotations: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(scaling["beta_slow"])), width - 1)
    span = high - low if high != low else 0.001
    index = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    slowed = ((index - low) / span).clamp(0, 1)
    return frequencies / scaling["factor"] * slowed + frequencies * (1 - slowed)


def layer_frequencies(config: DeepseekV41TextConfig, compressed: bool) -> Tensor:
    """`yarn_frequencies` of a layer: fp32 [qk_rope_head_dim / 2]."""
    if compressed:
        return yarn_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_parameters)
    return yarn_frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def rotation_table(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Unit complex rotations, complex64 [..., width / 2], for integer `positions` [...]."""
    angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
    return torch.polar(torch.ones_like(angles), angles)


class _Rotation(torch.autograd.Function):
    """Rotation that keeps the table alone: the gradient is rotated backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.inverse = inverse
        return _rotated(x, table, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return _rotated(gradients[0], table, not ctx.inverse), None, None


def _rotated(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    still = x.shape[-1] - 2 * table.shape[-1]
    out = x.clone(memory_format=torch.contiguous_format)
    turning = out[..., still:].unflatten(-1, (-1, 2))
    pairs = widen(turning)
    if pairs is turning and (still % 2 or table.shape[-1] % WHOLE_VECTORS):
        pairs = turning.clone(memory_format=torch.contiguous_format)
    if x.dim() == 4:
        table = table.unsqueeze(-2)
    torch.view_as_complex(pairs).mul_(table.conj() if inverse else table)
    turning.copy_(pairs)  # nothing to do where they are the same tensor
    return out


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last channels of `x`.

    Args:
        x: [B, S, D] or [B, S, heads, D]; the last ``2 * table.shape[-1]`` channels rotate, the others pass.
        table: Complex rotations [B, S, width / 2] or [S, width / 2].
        inverse: Rotate backwards.

    Returns:
        A new tensor like `x`; arithmetic at least fp32.
    """
    out: Tensor = _Rotation.apply(x, table, inverse)
    return out
