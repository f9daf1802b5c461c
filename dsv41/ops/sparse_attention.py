"""Sparse attention of CSA2 without a tensor of queries times keys: the cost grows with S, not with S squared.

Queries are taken in chunks. Each chunk sees

    window     the last W raw positions: blocks of b queries against the b + W - 1 keys that any of them sees, as
               views of one padded tensor, with a band mask;
    selection  K compressed positions per query: gathered, or, where no more than ALPHA * K positions exist that far
               into the row, all of those behind a mask, since a dense product over a few more keys is cheaper;
    sink       one logit per head, with a value of zero;

under one softmax. Keys and values are the same tensor, so it is read once and its two gradients are added in place.
Only the inputs and the log-sum-exp are kept for backward, which goes through the chunks again.

Shapes: B batch, S queries, H heads, D head_dim, T compressed positions, K selected ones, c queries of a chunk, b of a
block, n visible compressed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.ops.dense_attention import dense_attention
from dsv41.ops.precision import full_precision, widen

# At 512 channels, top-k 512 and 1024 positions, 0, 1, 2 and 4 take 3.1, 2.0, 0.89 and 0.86 s (benchmarks/attention.py).
ALPHA = 2
BLOCK = 16  # queries that share a view of window keys; b + W - 1 keys are read for W that are needed
CHUNK = 4 * BLOCK  # queries at most: the first of a chunk masks positions that the last sees
GATHER_BYTES = 8 << 20  # of gathered fp32 keys at a time, where a chunk of one block allows it


@dataclass(frozen=True)
class _Chunk:
    """Chunk of queries `start` to `stop`, with the compressed positions visible to them.

    Attributes:
        start: First query, a multiple of the block.
        stop: Behind the last.
        visible: Compressed positions that the last of them can see.
        dense: Whether all visible ones are scored, not the selected ones alone.
    """

    start: int
    stop: int
    visible: int
    dense: bool


def _chunks(q: Tensor, compressed: Tensor | None, selection: Tensor | None, ratio: int) -> Iterator[_Chunk]:
    batch, length, _, width = q.shape
    count = 0 if selection is None else selection.shape[-1]
    row = max(count, 1) * width * batch * 4
    size = max(BLOCK, min(CHUNK, GATHER_BYTES // row) // BLOCK * BLOCK)
    for start in range(0, length, size):
        stop = min(start + size, length)
        visible = 0 if compressed is None else min(stop // ratio, compressed.shape[1])
        yield _Chunk(start, stop, visible, visible <= ALPHA * count)


class _Views:
    """Views and logits shared by forward and backward, in wide arithmetic.

    Args:
        q: Queries [B, S, H, D].
        kv: Window keys/values [B, S, D].
        compressed: Compressed keys/values [B, T, D], or None.
        selection: int64 [B, S, K], -1 where absent, or None.
        window: W.
    """

    def __init__(self, q: Tensor, kv: Tensor, compressed: Tensor | None, selection: Tensor | None, window: int) -> None:
        self.batch, self.length, self.heads, self.width = q.shape
        self.span = BLOCK + window - 1
        self.before = window - 1
        # Zero rows before the first key, and behind the last to fill its block.
        self.padded = F.pad(widen(kv), (0, 0, self.before, -self.length % BLOCK))
        self.compressed = None if compressed is None else widen(compressed).contiguous()
        self.selection = selection
        self.scale = self.width**-0.5
        index = torch.arange(self.span, device=q.device)
        distance = index - torch.arange(BLOCK, device=q.device).unsqueeze(-1)
        band = torch.zeros(BLOCK, 1, self.span, dtype=self.padded.dtype, device=q.device)
        self.band = band.masked_fill_(((distance < 0) | (distance >= window)).unsqueeze(1), float("-inf"))

    def rows(self, tensor: Tensor, chunk: _Chunk) -> Tensor:
        """Chunk of queries or gradients [B, S, H, D], filled up to whole blocks: [B, c, H, D], a contiguous copy."""
        part = widen(tensor[:, chunk.start : chunk.stop])
        if missing := -part.shape[1] % BLOCK:
            return F.pad(part, (0, 0, 0, 0, 0, missing))
        return part.clone(memory_format=torch.contiguous_format)

    def blocks(self, rows: Tensor) -> Tensor:
        """Blocks [B * c / b, b * H, ...] of rows [B, c, H, ...]."""
        return rows.reshape(-1, BLOCK * self.heads, *rows.shape[3:])

    def window_keys(self, chunk: _Chunk) -> Tensor:
        """Keys of every block of a chunk [B * c / b, b + W - 1, D]; a view for a single row."""
        count = -(-(chunk.stop - chunk.start) // BLOCK)
        stride = self.padded.stride()
        blocks = self.padded.as_strided(
            (self.batch, count, self.span, self.width),
            (stride[0], BLOCK * stride[1], stride[1], 1),
            self.padded.storage_offset() + chunk.start * stride[1],
        )
        return blocks.flatten(0, 1)

    def window_logits(self, rows: Tensor, keys: Tensor, chunk: _Chunk) -> Tensor:
        """Masked logits [B, c, H, b + W - 1] of scaled queries."""
        logits = torch.bmm(self.blocks(rows), keys.transpose(1, 2))
        logits = logits.view(self.batch, -1, BLOCK, self.heads, self.span).add_(self.band)
        for block in range(logits.shape[1]):
            # Positions before the first one: rows of zeros, which are no keys.
            missing = self.before - chunk.start - block * BLOCK
            if missing <= 0:
                break
            logits[:, block, :, :, :missing] = float("-inf")
        return logits.view(self.batch, -1, self.heads, self.span)

    def chosen(self, chunk: _Chunk) -> Tensor:
        """Selections of a chunk filled up to whole blocks, int64 [B, c, K]."""
        assert self.selection is not None
        part = self.selection[:, chunk.start : chunk.stop]
        return F.pad(part, (0, 0, 0, -part.shape[1] % BLOCK), value=-1)

    def selected_keys(self, chunk: _Chunk, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed keys of a chunk, [B, n, D] or gathered [B * c, K, D]; and their rows in the flat [B * T]."""
        assert self.compressed is not None
        if chunk.dense:
            return self.compressed[:, : chunk.visible], chosen
        offset = torch.arange(self.batch, device=chosen.device).view(-1, 1, 1) * self.compressed.shape[1]
        flat = (chosen.clamp_min(0) + offset).flatten()
        gathered = self.compressed.flatten(0, 1).index_select(0, flat)
        return gathered.view(-1, chosen.shape[-1], self.width), flat

    def selected_logits(self, rows: Tensor, keys: Tensor, chunk: _Chunk, chosen: Tensor) -> Tensor:
        """Masked logits [B, c, H, n] or [B, c, H, K]."""
        if not chunk.dense:
            logits = torch.bmm(rows.flatten(0, 1), keys.transpose(1, 2)).view(*rows.shape[:3], -1)
            return logits.masked_fill_((chosen < 0).unsqueeze(2), float("-inf"))
        logits = torch.bmm(rows.flatten(1, 2), keys.transpose(1, 2)).view(*rows.shape[:3], -1)
        mask = logits.new_full((*chosen.shape[:2], chunk.visible + 1), float("-inf"))
        mask.scatter_(-1, chosen.masked_fill(chosen < 0, chunk.visible), 0.0)
        return logits.add_(mask[..., :-1].unsqueeze(2))


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        compressed: Tensor | None,
        sink: Tensor,
        selection: Tensor | None,
        live: Tensor,
        window: int,
        ratio: int,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        views = _Views(q, kv, compressed, selection, window)
        batch, length, heads, _ = q.shape
        wide_sink = sink.to(views.padded.dtype)
        out = q.new_empty(q.shape)
        lse = views.padded.new_empty(batch, length, heads)
        mass = None
        if with_mass:
            assert selection is not None
            mass = views.padded.new_zeros(selection.shape)
        for chunk in _chunks(q, compressed, selection, ratio):
            rows = views.rows(q, chunk).mul_(views.scale)
            keys = views.window_keys(chunk)
            near = views.window_logits(rows, keys, chunk)
            top = torch.maximum(near.amax(-1), wide_sink)
            if chunk.visible:
                chosen = views.chosen(chunk)
                far_keys, _ = views.selected_keys(chunk, chosen)
                far = views.selected_logits(rows, far_keys, chunk, chosen)
                top = torch.maximum(top, far.amax(-1))
            near = near.sub_(top.unsqueeze(-1)).exp_()
            total = near.sum(-1) + (wide_sink - top).exp()
            mixed = torch.bmm(views.blocks(near), keys).view(rows.shape)
            if chunk.visible:
                far = far.sub_(top.unsqueeze(-1)).exp_()
                total += far.sum(-1)
                together = far.flatten(1, 2) if chunk.dense else far.flatten(0, 1)
                mixed += torch.bmm(together, far_keys).view(rows.shape)
            mixed /= total.unsqueeze(-1)
            count = chunk.stop - chunk.start
            if chunk.visible and mass is not None:
                share = torch.einsum("bchn,bch->bcn", far, total.reciprocal())
                if chunk.dense:
                    share = share.gather(-1, chosen.clamp(0, chunk.visible - 1)).masked_fill_(chosen < 0, 0.0)
                mass[:, chunk.start : chunk.stop] = share[:, :count]
            out[:, chunk.start : chunk.stop] = mixed[:, :count]
            lse[:, chunk.start : chunk.stop] = (top + total.log())[:, :count]
        out.masked_fill_(~live[..., None, None], 0.0)
        ctx.save_for_backward(q, kv, compressed, sink, selection, live, lse)
        ctx.sizes = window, ratio
        if mass is not None:
            mass.masked_fill_(~live.unsqueeze(-1), 0.0)
            ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, kv, compressed, sink, selection, live, lse = ctx.saved_tensors
        window, ratio = ctx.sizes
        # A dead query has no gradient: with its output's gradient, all terms below vanish.
        d_out = gradients[0].masked_fill(~live[..., None, None], 0.0)
        with full_precision(q):
            views = _Views(q, kv, compressed, selection, window)
            wide_sink = sink.to(views.padded.dtype)
            d_q = torch.empty_like(q)
            d_padded = torch.zeros_like(views.padded)
            d_compressed = None if views.compressed is None else torch.zeros_like(views.compressed)
            d_sink = torch.zeros_like(wide_sink)
            for chunk in _chunks(q, compressed, selection, ratio):
                rows = views.rows(q, chunk).mul_(views.scale)
                d_rows = views.rows(d_out, chunk)
                count = chunk.stop - chunk.start
                norm = F.pad(lse[:, chunk.start : chunk.stop], (0, 0, 0, rows.shape[1] - count)).unsqueeze(-1)

                keys = views.window_keys(chunk)
                near = views.window_logits(rows, keys, chunk).sub_(norm).exp_()
                d_near = torch.bmm(views.blocks(d_rows), keys.transpose(1, 2)).view(near.shape)
                # The mean of the weights' gradients, from the weights: the output may have been rounded to bf16.
                mean = (near * d_near).sum(-1, keepdim=True)
                if chunk.visible:
                    chosen = views.chosen(chunk)
                    far_keys, flat = views.selected_keys(chunk, chosen)
                    far = views.selected_logits(rows, far_keys, chunk, chosen).sub_(norm).exp_()
                    first, last = (1, 2) if chunk.dense else (0, 1)
                    queries, d_queries = rows.flatten(first, last), d_rows.flatten(first, last)
                    d_far = torch.bmm(d_queries, far_keys.transpose(1, 2)).view(far.shape)
                    mean += (far * d_far).sum(-1, keepdim=True)
                d_sink -= ((wide_sink.unsqueeze(-1) - norm).exp() * mean).sum((0, 1, 3))

                d_near = d_near.sub_(mean).mul_(near)
                d_part = torch.bmm(views.blocks(d_near), keys).view(rows.shape)
                # As keys and as values at once: the two products share their shape.
                both = torch.cat((views.blocks(d_near), views.blocks(near)), dim=1).transpose(1, 2)
                d_keys = torch.bmm(both, torch.cat((views.blocks(rows), views.blocks(d_rows)), dim=1))
                d_keys = d_keys.view(views.batch, -1, views.span, views.width)
                for block in range(d_keys.shape[1]):
                    begin = chunk.start + block * BLOCK
                    d_padded[:, begin : begin + views.span] += d_keys[:, block]

                if chunk.visible:
                    assert d_compressed is not None
                    d_far = d_far.sub_(mean).mul_(far).flatten(first, last)
                    d_part += torch.bmm(d_far, far_keys).view(rows.shape)
                    both = torch.cat((d_far, far.flatten(first, last)), dim=1).transpose(1, 2)
                    d_far_keys = torch.bmm(both, torch.cat((queries, d_queries), dim=1))
                    if chunk.dense:
                        d_compressed[:, : chunk.visible] += d_far_keys
                    else:
                        d_compressed.flatten(0, 1).index_add_(0, flat, d_far_keys.flatten(0, 1))
                d_q[:, chunk.start : chunk.stop] = d_part.mul_(views.scale)[:, :count]
            d_kv = d_padded[:, views.before : views.before + views.length].to(kv.dtype)
            narrow = None if d_compressed is None else d_compressed.to(compressed.dtype)
        return d_q, d_kv, narrow, d_sink.to(sink.dtype), None, None, None, None, None


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    compressed: Tensor | None,
    sink: Tensor,
    selection: Tensor | None,
    live: Tensor,
    window: int,
    ratio: int,
    with_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over window, selection and sink (ARCHITECTURE 4).

    Args:
        q: Queries [B, S, H, D].
        kv: Keys and values in one of the raw positions [B, S, D].
        compressed: The same of the compressed positions [B, T, D], or None for a layer with a window alone.
        sink: Logits [H], at least fp32.
        selection: int64 [B, S, K], distinct positions that have ended by the query, -1 where absent; or None.
        live: Bool [B, S]; padding is false, on the right only, and gets zeros.
        window: Raw positions that a query sees, itself included, at least 1; a window beyond S costs nothing.
        ratio: Tokens per compressed position; 0 without.
        with_mass: Also return the attention's mass on the selected positions.

    Returns:
        [B, S, H, D] in the dtype of `q`; arithmetic at least fp32. And with `with_mass` the attention's probability of
        each selected position, summed over heads, at least fp32 [B, S, K], zero where absent, without a gradient.
    """
    window = min(window, q.shape[1])  # no query has more positions behind it, and views of more would be padding
    with full_precision(q):
        out: tuple[Tensor, Tensor | None] = _SparseAttention.apply(
            q, kv, compressed, sink, selection, live, window, ratio, with_mass
        )
    return out


# "sparse" reads the keys that are attended, "eager" and "sdpa" all of them behind a mask; the same function.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "sparse": sparse_attention,
    "eager": partial(dense_attention, masked="eager"),
    "sdpa": partial(dense_attention, masked="sdpa"),
}
