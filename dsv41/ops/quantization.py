"""Fake quantisation of the caches (ARCHITECTURE 8): round to a narrow grid and back, gradient passed straight through.

These are part of the function in every dtype, fp32 too: the release keeps window KV in FP8, index queries and keys in
MXFP4 and compressed KV in NVFP4, and a model trained without the rounding is a different one.

| format | grid | group | scale |
|---|---|---|---|
| fp8 | E4M3 | 32 | power of two, ceil of amax / 448, amax >= 1e-4 |
| mxfp4 | E2M1 | 32 | power of two, ceil of amax / 6, amax >= 6 * 2^-126 |
| nvfp4 | E2M1 | 16 | amax / 6 rounded to E4M3 and saturated at 448, amax >= 6 * 2^-9 |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def _power_of_two_ceil(x: Tensor) -> Tensor:
    """Smallest power of two at or above each positive normal fp32 value, by bit arithmetic (a log would round)."""
    bits = x.view(torch.int32)
    return ((bits + _MANTISSA_BITS) & _EXPONENT_BITS).view(torch.float32)


def round_(x: Tensor, least: float, most: float, mantissa_bits: int) -> Tensor:
    """Round fp32 `x` in place to a float format of few bits, ties to even; |x| > `most` saturates.

    Adding and subtracting 1.5 * 2^(23 - m) times the value's own power of two lets fp32's round-to-nearest-even drop
    all but m mantissa bits; below `least`, the smallest normal value, the grid is uniform. A zero comes out positive.
    """
    x.clamp_(-most, most)
    exponent = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    shift = exponent.clamp_min_(least).mul_(1.5 * 2.0 ** (23 - mantissa_bits))
    return x.add_(shift).sub_(shift)


def _fp8(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = _power_of_two_ceil(amax / E4M3_MAX)
    # Equal to torch's casts to float8 and back, in half the time on a CPU; those keep the sign of a zero.
    return round_(groups / scale, 2.0**-6, E4M3_MAX, 3).copysign_(groups).mul_(scale)


def _mxfp4(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = _power_of_two_ceil(amax / E2M1_MAX)
    return round_(groups / scale, 1.0, E2M1_MAX, 1).mul_(scale)


def _nvfp4(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return round_(groups / scale, 1.0, E2M1_MAX, 1).mul_(scale)


_FORMATS = {"fp8": (_fp8, 32), "mxfp4": (_mxfp4, 32), "nvfp4": (_nvfp4, 16)}


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        quantize, group = _FORMATS[name]
        channels = x.shape[-1]
        padded = F.pad(x, (0, -channels % group)) if channels % group else x
        # In fp32 this is the caller's memory: the formats write to what they have divided, never to the groups.
        rounded = quantize(padded.float().unflatten(-1, (-1, group))).flatten(-2)
        return rounded[..., :channels].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantize(x: Tensor, name: str) -> Tensor:
    """Quantise and dequantise `x` along its last axis; the gradient passes unchanged.

    Args:
        x: Floating tensor [..., channels]. A partial last group is padded with zeros and cropped.
        name: "fp8", "mxfp4" or "nvfp4".

    Returns:
        Tensor like `x`. Arithmetic is fp32 in every dtype.

    Raises:
        ValueError: Unknown format.
    """
    if name not in _FORMATS:
        raise ValueError(f"name: must be one of {sorted(_FORMATS)}, got {name!r}")
    return _FakeQuantize.apply(x, name)
