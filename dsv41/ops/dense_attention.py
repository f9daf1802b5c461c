"""Dense attention over all keys behind a mask: CSA2's reference, with time and memory of queries times keys.

    logits[s, h, l] = q[s, h] . kv[l] / sqrt(D)    where the mask allows l for s
    p = softmax over the allowed l and one sink logit per head
    out[s, h] = sum_l p[s, h, l] kv[l]             the sink's value is zero

Shapes: B batch, S queries, D head_dim, L keys, T compressed positions, K selected ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.ops.precision import full_precision, widen
from dsv41.ops.selection import membership


def window_mask(token_mask: Tensor, window: int) -> Tensor:
    """Raw positions that a query sees: bool [B, S, S], the last `window` up to itself, live ones only."""
    index = torch.arange(token_mask.shape[1], device=token_mask.device)
    distance = index.unsqueeze(-1) - index
    return ((distance >= 0) & (distance < window)) & token_mask.unsqueeze(1)


def attention_weights(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Probabilities of keys [B, S, heads, L], at least fp32; arguments as in `eager_attention`."""
    with full_precision(q):
        logits = torch.einsum("bshd,bld->bshl", widen(q), widen(kv)) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~mask.unsqueeze(2), float("-inf"))
        column = sink.to(logits.dtype)[:, None].expand(*logits.shape[:2], -1, 1)
        return torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1]


def eager_attention(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """Reference attention with one sink logit per head in the denominator.

    Args:
        q: Queries [B, S, heads, D].
        kv: Keys and values in one [B, L, D].
        mask: Bool [B, S, L], true where attended. A row may be empty: its output is zero.
        sink: [heads], at least fp32.

    Returns:
        [B, S, heads, D] in the dtype of `q`; arithmetic at least fp32.
    """
    with full_precision(q):
        return torch.einsum("bshl,bld->bshd", attention_weights(q, kv, mask, sink), widen(kv)).to(q.dtype)


def sdpa_attention(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """`eager_attention` by torch's kernel: the sink becomes a zero key/value with the sink as its additive mask."""
    batch, _, width = kv.shape
    with full_precision(q):
        wide_kv = torch.cat((widen(kv), widen(kv).new_zeros(batch, 1, width)), dim=1).unsqueeze(1)
        bias = torch.zeros(mask.shape, dtype=wide_kv.dtype, device=kv.device).masked_fill(~mask, float("-inf"))
        heads = q.shape[2]
        column = sink.to(bias.dtype).view(1, heads, 1, 1).expand(batch, -1, q.shape[1], 1)
        bias = torch.cat((bias.unsqueeze(1).expand(-1, heads, -1, -1), column), dim=-1)
        keys = wide_kv.expand(-1, heads, -1, -1)
        out = F.scaled_dot_product_attention(widen(q).transpose(1, 2), keys, keys, attn_mask=bias)
    return out.transpose(1, 2).to(q.dtype)


MASKED_ATTENTION = {"eager": eager_attention, "sdpa": sdpa_attention}


def dense_attention(
    q: Tensor,
    kv: Tensor,
    compressed: Tensor | None,
    sink: Tensor,
    selection: Tensor | None,
    live: Tensor,
    window: int,
    ratio: int,
    with_mass: bool = False,
    *,
    masked: str,
) -> tuple[Tensor, Tensor | None]:
    """Window, selection and sink with all keys behind one mask.

    Args:
        q, kv, compressed, sink, selection, live, window, ratio, with_mass: See `sparse_attention`.
        masked: A key of `MASKED_ATTENTION`.

    Returns:
        See `sparse_attention`.
    """
    mask = window_mask(live, window)
    if compressed is not None and selection is not None:
        kv = torch.cat((kv, compressed), dim=1)
        mask = torch.cat((mask, membership(selection, compressed.shape[1])), dim=-1)
    mask = mask & live.unsqueeze(-1)
    out, mass = MASKED_ATTENTION[masked](q, kv, mask, sink), None
    if with_mass:
        assert selection is not None
        with torch.no_grad():
            far = attention_weights(q, kv, mask, sink)[..., q.shape[1] :].sum(2)
            mass = far.gather(-1, selection.clamp_min(0)).masked_fill(selection < 0, 0.0)
    return out, mass
