"""RMSNorm, computed in fp32 and cast once at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsv41.ops.precision import widen


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one factor per row; autograd would keep the scaled input too, all in fp32.

    With n = x * scale and the row means <.>, d_x = scale * (d_out * weight - n * <d_out * weight * n>).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widen(x)
        out = wide.square()
        scale = torch.rsqrt(out.mean(-1, keepdim=True) + eps)
        torch.mul(wide, scale, out=out).mul_(weight.to(wide.dtype))
        ctx.save_for_backward(x, weight, scale)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, d_out, gain = widen(x), widen(gradients[0]), weight.to(scale.dtype)
        buffer = (wide * scale).mul_(d_out)
        d_x, d_weight = None, None
        if ctx.needs_input_grad[1]:
            d_weight = buffer.reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            mean = buffer.mul_(gain).mean(-1, keepdim=True)
            torch.mul(d_out, gain, out=buffer).addcmul_(wide, mean.mul_(scale), value=-1).mul_(scale)
            d_x = buffer.to(x.dtype)
        return d_x, d_weight, None


class RMSNorm(nn.Module):
    """RMSNorm over the last axis: ``x * rsqrt(mean(x^2) + eps) * weight``.

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
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out
