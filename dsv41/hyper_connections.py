"""Single-pass manifold-constrained hyper-connections (ARCHITECTURE 3; mHC, arXiv:2512.24880).

A block carries C residual streams. Each site (attention, MoE) predicts from the streams it sees
  pre  [C]     how the NEXT site reads: x = sum_c pre[c] * stream[c],
  post [C]     how its own output y is written into each stream,
  comb [C, C]  how the streams mix among themselves, a doubly stochastic matrix.
That `pre` acts one site later is what makes it single-pass: streams are read once for both coefficients and mixing.

Shapes: B batch, S sequence, C streams, H hidden. Coefficients are at least fp32 everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.initialization import NamedDraws
from dsv41.precision import full_precision, widen
from dsv41.sharding import copy_rows_


class _Sinkhorn(torch.autograd.Function):
    """Sinkhorn in the layout [C_in, C_out, ...], where every sum adds whole vectors, with an analytic backward.

    A step y = x / s, s = sum(x) + eps, is undone by x = y * s, so only the last y and the sums are kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        rows = logits.movedim((-2, -1), (0, 1)).contiguous()
        soft = rows.softmax(1)
        y = soft + eps
        sums = []
        for step in range(2 * iterations - 1):
            total = y.sum(step % 2, keepdim=True).add_(eps)
            y.div_(total)
            sums.append(total)
        ctx.save_for_backward(soft, y, *sums)
        return y.movedim((0, 1), (-2, -1)).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        soft, y, *sums = ctx.saved_tensors
        y = y.clone()
        gradient = gradients[0].movedim((-2, -1), (0, 1)).contiguous().clone()
        for step in reversed(range(len(sums))):
            gradient.sub_((gradient * y).sum(step % 2, keepdim=True)).div_(sums[step])
            y.mul_(sums[step])
        weighted = gradient * soft
        through_softmax = weighted - soft * weighted.sum(1, keepdim=True)
        return through_softmax.movedim((0, 1), (-2, -1)), None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Project matrices towards the doubly stochastic ones by alternating normalisation.

    Args:
        logits: [..., C_in, C_out], at least fp32.
        iterations: Rounds; the first is a row softmax and a column division, each further one divides rows, then
            columns. Columns are therefore exact up to `eps`, rows nearly so.
        eps: Added to every entry once and to every sum.

    Returns:
        Positive matrices like `logits`.
    """
    return _Sinkhorn.apply(logits, iterations, eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read one vector from the streams: ``sum_c pre[c] * stream[c]``.

    Args:
        streams: [B, S, C, H].
        pre: [B, S, C], at least fp32.

    Returns:
        [B, S, H] in the dtype of `streams`.
    """
    return (pre.unsqueeze(-1) * widen(streams)).sum(-2).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output and mix: ``out[o] = post[o] * y + sum_i comb[i, o] * stream[i]``.

    Args:
        y: [B, S, H].
        streams: [B, S, C, H].
        post: [B, S, C], at least fp32.
        comb: [B, S, C_in, C_out], at least fp32.

    Returns:
        [B, S, C, H] in the dtype of `streams`.
    """
    with full_precision(streams):
        mixed = torch.matmul(comb.transpose(-1, -2), widen(streams))
        return (post.unsqueeze(-1) * widen(y).unsqueeze(-2) + mixed).to(streams.dtype)


class HyperConnection(nn.Module):
    """Predicts the mixing coefficients of one site from the streams.

    Args:
        config: Uses hidden_size, hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps.
    """

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.streams = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.initializer_range = config.initializer_range
        rows = (2 + config.hc_mult) * config.hc_mult
        self.fn = nn.Parameter(torch.empty(rows, config.hc_mult * config.hidden_size))
        self.base = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(3))
        self.init_weights(NamedDraws())

    def init_weights(self, draws: NamedDraws) -> None:
        """Start close to an ordinary residual: read the mean of the streams, write everywhere, keep streams apart."""
        draws.normal_(self.fn, "fn", self.initializer_range)
        nn.init.constant_(self.scale, 0.01)
        streams = self.streams
        base = torch.zeros(self.base.shape, dtype=torch.float64)  # the parameter's dtype rounds it, not the default
        # sigmoid(base) = 1 / C: with equal streams the site reads their common value.
        base[:streams].fill_(-math.log(max(streams - 1, 1)))
        # exp(4) against 1: streams mostly keep to themselves, yet every entry has a gradient.
        base[2 * streams :].view(streams, streams).fill_diagonal_(4.0)
        copy_rows_(self.base, base)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients of `streams` [B, S, C, H].

        Returns:
            pre [B, S, C] in (hc_eps, 1 + hc_eps), post [B, S, C] in (0, 2), comb [B, S, C_in, C_out]; at least fp32.
        """
        with full_precision(streams):
            flat = widen(streams.flatten(-2))
            fn, base, scale = (p.to(flat.dtype) for p in (self.fn, self.base, self.scale))
            inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
            mixes = F.linear(flat, fn) * inverse_rms
            count = self.streams
            parts = (count, count, count * count)
            per_row = torch.cat([one.expand(size) for one, size in zip(scale, parts, strict=True)])
            # One fused multiply-add, as in the release; multiply then add rounds differently.
            logits = torch.addcmul(base, mixes, per_row)
            pre, post, comb = logits.split(parts, dim=-1)
            comb = sinkhorn(comb.unflatten(-1, (count, count)), self.iterations, self.eps)
            return pre.sigmoid() + self.eps, 2 * post.sigmoid(), comb
