"""RMSNorm, computed in fp32 and cast once at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv41.precision import widen


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        width: Size of the last axis.
        eps: Added to the mean square. The released 1e-20 is a normal fp32 number: a zero vector stays zero.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]; arithmetic at least fp32, result in the dtype of `x`."""
        wide = widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.to(wide.dtype)).to(x.dtype)
