"""Next-token cross-entropy, whole or fused with the head.

`causal_lm_loss` takes logits. `chunked_causal_lm_loss` takes the inputs of the head and never has the logits of all
positions at once: it goes through the live positions in chunks, and computes loss and both gradients while
the logits of a chunk exist. Positions without a label are left out before the product with the vocabulary; on a
GPU they get a weight of zero instead, since the host would have to wait to count them.

Memory, beyond hidden states and the gradient of the head's weight, does not grow with the length: `LOGIT_BYTES`, or
`FEWEST_ROWS` rows of logits where the vocabulary is so large that these are more (66 MB for 129280 ids).

Shapes: B batch, S sequence, H hidden, V vocabulary, N = B * S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.config import IGNORE_INDEX
from dsv41.ops.precision import full_precision, widen

# Of the logits that exist together. Smaller chunks add up the gradient of the head's weight more often.
LOGIT_BYTES = 16 << 20
FEWEST_ROWS = 128  # of a chunk, whatever the vocabulary


class CrossEntropy(NamedTuple):
    """Loss as sum and count, from which means over several batches or ranks follow.

    Attributes:
        nats: Cross-entropy summed over predicted tokens, a scalar.
        tokens: Number of predicted tokens, int64 scalar.
    """

    nats: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Nats per predicted token; 0 if there are none."""
        return self.nats / self.tokens.clamp_min(1)


def next_tokens(labels: Tensor) -> Tensor:
    """Target of each position: `labels` [B, S] shifted by one to the left, int64, -100 at the end of a row."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).long()


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum()


def causal_lm_loss(logits: Tensor, labels: Tensor) -> CrossEntropy:
    """Next-token cross-entropy.

    Args:
        logits: [B, S, V], at least fp32; position p predicts label p + 1.
        labels: int64 [B, S], -100 where ignored.
    """
    targets = labels[:, 1:].reshape(-1).long()
    total = F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), targets, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return CrossEntropy(total, _count(targets))


def chunked_causal_lm_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> CrossEntropy:
    """`causal_lm_loss` of ``hidden @ weight.T`` without the logits.

    Gradients are computed in forward and scaled in place in backward: a retained graph supports one
    backward only.

    Args:
        hidden: [B, S, H].
        weight: Weight of the head [V, H], at least fp32; products are in its dtype, or wider if `hidden` is.
        labels: int64 [B, S], -100 where ignored.

    Returns:
        Sum, at least fp32, and count.
    """
    targets = next_tokens(labels).flatten()
    # The number of live positions is not read from a GPU, which would synchronise.
    drop_dead = not hidden.is_cuda
    with full_precision(hidden):
        total = _ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets, drop_dead, torch.is_grad_enabled())
    return CrossEntropy(total, _count(targets))


def _full(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[CrossEntropy, Tensor | None]:
    with full_precision(hidden):
        wide = widen(hidden)
        logits = F.linear(wide, weight.to(wide.dtype))
    return causal_lm_loss(logits, labels), logits


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[CrossEntropy, Tensor | None]:
    return chunked_causal_lm_loss(hidden, weight, labels), None


# Hidden states [B, S, H], weight [V, H], labels [B, S] -> loss; and logits [B, S, V], where they were made.
IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[CrossEntropy, Tensor | None]]] = {
    "chunked": _chunked,
    "full": _full,
}


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of hidden states [N, H], a weight [V, H] and targets int64 [N].

    Dead positions are left out with `drop_dead`; without it they take part with a weight of zero.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, drop_dead: bool, with_gradients: bool
    ) -> Tensor:
        dtype = torch.promote_types(widen(hidden).dtype, weight.dtype)
        matrix = weight.to(dtype)
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if with_gradients and ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(matrix) if with_gradients and ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        rows = torch.arange(len(targets), device=hidden.device)
        if drop_dead:
            rows = rows[targets != IGNORE_INDEX]
        size = min(len(rows), max(FEWEST_ROWS, LOGIT_BYTES // (len(matrix) * dtype.itemsize)))
        buffer = torch.empty(size, len(matrix), dtype=dtype, device=hidden.device)
        for part in rows.split(max(size, 1)):
            wide = hidden.index_select(0, part).to(dtype)
            target = targets.index_select(0, part).unsqueeze(-1)
            dead = target == IGNORE_INDEX
            target = target.masked_fill(dead, 0)
            logits = torch.mm(wide, matrix.t(), out=buffer[: len(part)])
            picked = logits.gather(-1, target)
            top = logits.amax(-1, keepdim=True)
            mass = logits.sub_(top).exp_().sum(-1, keepdim=True)
            total += (mass.log() + top - picked).masked_fill_(dead, 0.0).sum()
            if d_hidden is None and d_weight is None:
                continue
            d_logits = logits.div_(mass)
            d_logits.scatter_add_(-1, target, torch.full_like(mass, -1.0))
            if not drop_dead:
                d_logits.masked_fill_(dead, 0.0)
            if d_hidden is not None:
                d_hidden.index_copy_(0, part, d_logits @ matrix)
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), wide)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        scaled = (None if kept is None else kept.mul_(gradients[0]) for kept in ctx.saved_tensors)
        narrow = (None if kept is None else kept.to(dtype) for kept, dtype in zip(scaled, ctx.dtypes, strict=True))
        return *narrow, None, None, None
