"""Keeping experts busy alike (DeepSeek-V3, section 2.1.2; ARCHITECTURE 7).

Auxiliary-loss-free: after each optimizer step an expert's selection bias moves by a fixed amount, down if more tokens
than the mean have come to it in that step, up if fewer. Biases select only, so this trains nothing else. Text and image
tokens have biases of their own, moved by their own loads.

The optional sequence-wise loss acts inside a single row, which a bias cannot.

Shapes: N tokens, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_load(experts: Tensor, count: int, image_mask: Tensor | None = None) -> Tensor:
    """How many tokens visit each expert.

    Args:
        experts: int64 [N, k], -1 where a token visits none.
        count: Number E of experts.
        image_mask: Bool [N], true for image tokens; None is all text.

    Returns:
        int64 [2, E]: text tokens, image tokens.
    """
    # One bin more for those that visit none; not bincount, which makes a GPU be waited for.
    bins = torch.where(experts < 0, 2 * count, experts)
    if image_mask is not None:
        bins = bins + count * (image_mask.unsqueeze(-1) & (experts >= 0))
    bins = bins.flatten()
    load = torch.zeros(2 * count + 1, dtype=torch.int64, device=experts.device)
    return load.scatter_add_(0, bins, torch.ones_like(bins))[:-1].view(2, count)


def sequence_balance_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """Sequence-wise balance loss, summed over live tokens.

    For each row: (number of its live tokens) x sum over experts of f P, with f the expert's share of the row's visits
    times E, and P the mean over live tokens of the expert's share of the scores. Perfectly even it is 1 per token.
    Visits are those that took place, so selection biases count in f, where DeepSeek-V3 takes the top-k of the scores.

    Args:
        scores: Router scores [B, S, E], at least fp32; gradients reach these.
        experts: int64 [B, S, k], -1 at padding.

    Returns:
        Scalar.
    """
    count, per_token = scores.shape[-1], experts.shape[-1]
    live = experts[..., :1] >= 0
    shares = (scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)).masked_fill(~live, 0.0).sum(1)
    bins = experts.masked_fill(experts < 0, count).flatten(1)
    visits = scores.new_zeros(len(scores), count + 1).scatter_add_(1, bins, torch.ones_like(bins, dtype=scores.dtype))
    tokens = live.sum((1, 2)).clamp_min(1).unsqueeze(-1)
    return (visits[:, :-1] * count / (per_token * tokens) * shares).sum()


@torch.no_grad()
def move_biases_(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move selection biases [E] by `rate` against the int64 `load` [E] of a step: up below the mean, down above it.

    Without any load nothing moves.
    """
    # In integers: a mean that has been rounded, as on a GPU by the product with 1 / E, is nobody's load.
    bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype), alpha=rate)


def imbalance(load: Tensor) -> Tensor:
    """Load of the busiest expert over the mean, of `load` [..., E]: 1 is even, E / k at worst; NaN without tokens."""
    wide = load.double()
    return wide.amax(-1) / wide.mean(-1)
