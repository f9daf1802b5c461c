"""KL divergence of a learned indexer from the attention's probabilities, in chunks of queries (DeepSeek-V3.2, 2.1.1).

    loss = sum over queries of KL(target || softmax(scores)),   target = mass / sum(mass)
    scores[s, t] = sum_h w[s, h] * relu(q[s, h] . k[t]) at the selected positions

Gradients are computed together with the loss, and nothing of the size queries x heads x positions outlives its chunk.

Shapes: B batch, S queries, T compressed positions, I index heads, E index_head_dim, K selected positions; in a chunk
c queries and m scored positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.ops.precision import full_precision, widen
from dsv41.ops.selection import CHUNK_BYTES, GATHER_COST


class _Divergence(torch.autograd.Function):
    """Summed KL divergence; see `divergence`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, weights: Tensor, keys: Tensor, selection: Tensor, mass: Tensor, ratio: int
    ) -> Tensor:
        batch, length, heads, _ = q.shape
        positions, count = keys.shape[1], selection.shape[-1]
        wide_keys = widen(keys)
        total = wide_keys.new_zeros(())
        d_q, d_weights, d_keys = (torch.zeros_like(x, dtype=wide_keys.dtype) for x in (q, weights, keys))
        size = max(16, min(256, CHUNK_BYTES // (batch * heads * max(positions, 1) * wide_keys.element_size())))
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            seen = min(part.stop // ratio, positions)
            if seen == 0:
                continue
            asked, factors, chosen = widen(q[:, part]), widen(weights[:, part]), selection[:, part]
            target = mass[:, part].to(wide_keys.dtype)
            norm = target.sum(-1, keepdim=True)
            target = torch.where(norm > 0, target / norm, 0.0)
            # As in the attention: a product with all positions is cheaper than gathering a little fewer.
            dense = seen <= GATHER_COST * count
            if dense:
                near, flat = wide_keys[:, :seen].unsqueeze(1), None
                index = chosen.masked_fill(chosen < 0, seen)
                target = target.new_zeros(*chosen.shape[:2], seen + 1).scatter_(-1, index, target)[..., :-1]
                absent = torch.ones(*chosen.shape[:2], seen + 1, dtype=torch.bool, device=q.device)
                absent = absent.scatter_(-1, index, False)[..., :-1]
            else:
                offset = torch.arange(batch, device=q.device).view(-1, 1, 1) * positions
                flat = chosen.clamp_min(0) + offset
                near, absent = wide_keys.flatten(0, 1)[flat], chosen < 0
            products = (asked @ near.transpose(-1, -2)).relu_()  # [B, c, I, m]
            scores = (factors.unsqueeze(-2) @ products).squeeze(-2)
            # Not -inf: a query without any position has a row of them, and zeros as its target.
            logs = scores.masked_fill(absent, torch.finfo(scores.dtype).min).log_softmax(-1)
            total += (torch.xlogy(target, target) - target * logs).sum()
            d_scores = (logs.exp() * (norm > 0) - target).masked_fill_(absent, 0.0)
            d_weights[:, part] = (products @ d_scores.unsqueeze(-1)).squeeze(-1)
            d_products = (products > 0) * factors.unsqueeze(-1) * d_scores.unsqueeze(-2)
            d_q[:, part] = d_products @ near
            if flat is None:
                d_keys[:, :seen] += d_products.flatten(1, 2).transpose(1, 2) @ asked.flatten(1, 2)
            else:
                d_near = d_products.transpose(-1, -2) @ asked
                d_keys.flatten(0, 1).index_add_(0, flat.flatten(), d_near.flatten(0, 2))
        ctx.save_for_backward(d_q, d_weights, d_keys)
        ctx.dtypes = q.dtype, weights.dtype, keys.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        scaled = (kept * gradients[0] for kept in ctx.saved_tensors)
        return *(kept.to(dtype) for kept, dtype in zip(scaled, ctx.dtypes, strict=True)), None, None, None


def divergence(q: Tensor, weights: Tensor, keys: Tensor, selection: Tensor, mass: Tensor, ratio: int) -> Tensor:
    """KL divergence from the attention's probabilities to the indexer's, in nats, summed over queries.

    Args:
        q: Index queries [B, S, I, E].
        weights: Weights of their heads [B, S, I].
        keys: Index keys [B, T, E].
        selection: Positions that are compared, int64 [B, S, K], distinct, ended by the query, -1 where absent.
        mass: Attention's probability of each, of any scale, [B, S, K], zero where absent; without a gradient. A
            query without mass contributes nothing.
        ratio: Tokens per compressed position.

    Returns:
        Scalar, at least fp32. Gradients reach `q`, `weights` and `keys`.
    """
    with full_precision(q):
        out: Tensor = _Divergence.apply(q, weights, keys, selection, mass, ratio)
    return out
