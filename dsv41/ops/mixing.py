"""Residual streams: read, mix, and the Sinkhorn projection of mixing matrices (ARCHITECTURE 3).

    read      x = sum_c pre[c] * stream[c];   mixes = (f @ fn^T) * rsqrt(mean(f^2) + eps), f the flat streams
    sinkhorn  m = softmax_rows(logits) + eps; m /= columns; then rows, columns, ... (each sum + eps)
    expand    out[o] = post[o] * y + sum_i comb[i, o] * stream[i]

`_Read` and `_Mix` take a few tokens at a time, so that inputs of one operation are still in the cache for the
next, and so that bf16 streams are widened a few at a time. For backward they keep their inputs, not intermediate
results.

Shapes: B batch, S sequence, N = B * S tokens, C streams, H hidden, R = C * (2 + C) coefficients. Coefficients are at
least fp32 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.ops.compiled import CompiledCore
from dsv41.ops.precision import full_precision, widen

CHUNK_BYTES = 1 << 20  # of fp32 streams at a time: fits into the cache of a core
GPU_CHUNK_BYTES = 1 << 26  # enough to do for one kernel, yet little beside the streams; never measured


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
    @once_differentiable
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


def _chunks(streams: Tensor) -> Iterator[slice]:
    """Slices of tokens of streams [B, S, C, H] to process at a time."""
    tokens, per_token = streams.shape[:2].numel(), 4 * streams.shape[2:].numel()
    size = max(1, (CHUNK_BYTES if streams.device.type == "cpu" else GPU_CHUNK_BYTES) // per_token)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _workspace(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Buffer in `dtype` for a result that goes to `target`: `target` itself if it has that dtype."""
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)


class _Read(torch.autograd.Function):
    """``x = sum_c pre[c] * stream[c]`` and ``mixes = (f @ fn^T) * rsqrt(mean(f^2) + eps)`` of the flat streams f.

    `fn` is [R, C * H], `mixes` [B, S, R]; see `read_streams`.
    Here and in `_Mix`, gradients are returned as allocated, not as views: autograd adds up only such ones in place.
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        batch, length, _, hidden = streams.shape
        wide_fn = fn.to(pre.dtype)
        x = streams.new_empty(batch, length, hidden)
        mixes = pre.new_empty(batch, length, len(fn))
        inverse_rms = pre.new_empty(batch, length, 1)
        tokens, weights = streams.flatten(0, 1), pre.flatten(0, 1).unsqueeze(1)
        for part in _chunks(streams):
            wide = widen(tokens[part])
            x.flatten(0, 1)[part] = torch.bmm(weights[part], wide).squeeze(1)
            flat = wide.flatten(1)
            mean_square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square_().div_(flat.shape[1])
            scale = mean_square.add_(eps).rsqrt_()
            mixes.flatten(0, 1)[part] = torch.mm(flat, wide_fn.t()).mul_(scale)
            inverse_rms.flatten(0, 1)[part] = scale
        ctx.save_for_backward(streams, pre, fn, mixes, inverse_rms)
        return x, mixes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        streams, pre, fn, mixes, inverse_rms = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wide_fn = fn.to(pre.dtype)
        d_streams = streams.new_empty(streams.shape) if needed[0] else None
        d_pre = pre.new_empty(pre.shape) if needed[1] else None
        d_fn = torch.zeros_like(wide_fn) if needed[2] else None
        d_products = (gradients[1] * inverse_rms).flatten(0, 1)
        # d rsqrt(mean(f^2) + eps) = -rsqrt^3 * f / (C * H): the norm's part of the gradient lies along f.
        along = (gradients[1] * mixes).sum(-1, keepdim=True).mul_(inverse_rms.square()).div_(-fn.shape[1]).flatten(0, 1)
        tokens, weights = streams.flatten(0, 1), pre.flatten(0, 1).unsqueeze(-1)
        d_x = gradients[0].flatten(0, 1).unsqueeze(1)
        with full_precision(streams):
            for part in _chunks(streams):
                wide, d_read = widen(tokens[part]), widen(d_x[part])
                flat = wide.flatten(1)
                if d_pre is not None:
                    d_pre.flatten(0, 1)[part] = torch.bmm(d_read, wide.mT).squeeze(1)
                if d_fn is not None:
                    d_fn.addmm_(d_products[part].t(), flat)
                if d_streams is not None:
                    target = d_streams.flatten(0, 1)[part]
                    d_wide = _workspace(target, wide.dtype)
                    torch.mul(flat, along[part], out=d_wide.flatten(1)).addmm_(d_products[part], wide_fn)
                    target.copy_(d_wide.addcmul_(weights[part], d_read))
        return d_streams, d_pre, None if d_fn is None else d_fn.to(fn.dtype), None


class _Mix(torch.autograd.Function):
    """``out[o] = sum_i comb[i, o] * stream[i] + post[o] * y``; without `y` and `post` the sum alone. See `expand`."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, comb: Tensor, y: Tensor | None, post: Tensor | None) -> Tensor:
        batch, length, _, hidden = streams.shape
        out = streams.new_empty(batch, length, comb.shape[-1], hidden)
        tokens, weights = streams.flatten(0, 1), comb.flatten(0, 1).mT
        for part in _chunks(streams):
            target = out.flatten(0, 1)[part]
            mixed = torch.bmm(weights[part], widen(tokens[part]), out=_workspace(target, weights.dtype))
            if y is not None and post is not None:
                mixed.addcmul_(post.flatten(0, 1)[part].unsqueeze(-1), widen(y.flatten(0, 1)[part]).unsqueeze(1))
            target.copy_(mixed)
        ctx.save_for_backward(streams, comb, y, post)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        streams, comb, y, post = inputs = ctx.saved_tensors
        d_inputs = [
            tensor.new_empty(tensor.shape) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=True)
        ]
        d_streams, d_comb, d_y, d_post = (None if tensor is None else tensor.flatten(0, 1) for tensor in d_inputs)
        tokens, weights, d_out = (tensor.flatten(0, 1) for tensor in (streams, comb, gradients[0]))
        with full_precision(streams):
            for part in _chunks(streams):
                d_mixed = widen(d_out[part])
                if d_streams is not None:
                    target = d_streams[part]
                    target.copy_(torch.bmm(weights[part], d_mixed, out=_workspace(target, d_mixed.dtype)))
                if d_comb is not None:
                    d_comb[part] = torch.bmm(widen(tokens[part]), d_mixed.mT)
                if d_y is not None:
                    d_y[part] = torch.bmm(post.flatten(0, 1)[part].unsqueeze(1), d_mixed).squeeze(1)
                if d_post is not None:
                    d_post[part] = torch.bmm(widen(y.flatten(0, 1)[part]).unsqueeze(1), d_mixed.mT).squeeze(1)
        return tuple(d_inputs)


def read_streams(streams: Tensor, pre: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Input of a site and the raw prediction of its coefficients, in one pass over the streams.

    Args:
        streams: [B, S, C, H].
        pre: Carried mixture [B, S, C], fp32; float64 for float64 streams.
        fn: Projection [R, C * H].
        eps: RMS epsilon.

    Returns:
        ``sum_c pre[c] * stream[c]`` [B, S, H] in the dtype of `streams`; and ``(f @ fn^T) * rsqrt(mean(f^2) + eps)`` of
        the flat streams f, [B, S, R] in the dtype of `pre`. The caller switches off autocast and TF32.
    """
    out: tuple[Tensor, Tensor] = _Read.apply(streams, pre, fn, eps)
    return out


def _expand_eager(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out: Tensor = _Mix.apply(streams, comb, y, post)
    return out


def _expand_core(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`expand` written out, for a compiler that makes one pass of it; eager, the product is C times the streams."""
    mixed = (comb.unsqueeze(-1) * widen(streams).unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * widen(y).unsqueeze(-2) + mixed).to(streams.dtype)


# The other side of a site is not compiled: Sinkhorn takes a minute to compile and then more time and memory, and a
# compiled read saves widened streams.
IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "eager": _expand_eager,
    "compiled": CompiledCore("mHC expansion", _expand_core, _expand_eager),
}


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read one vector from the streams: ``sum_c pre[c] * stream[c]``.

    Args:
        streams: [B, S, C, H].
        pre: [B, S, C], fp32; float64 for float64 streams.

    Returns:
        [B, S, H] in the dtype of `streams`.
    """
    with full_precision(streams):
        out: Tensor = _Mix.apply(streams, pre.unsqueeze(-1), None, None)
        return out.squeeze(-2)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, implementation: str = "eager") -> Tensor:
    """Write a sublayer's output and mix: ``out[o] = post[o] * y + sum_i comb[i, o] * stream[i]``.

    Args:
        y: [B, S, H].
        streams: [B, S, C, H].
        post: [B, S, C], fp32; float64 for float64 streams.
        comb: [B, S, C_in, C_out] in the dtype of `post`.
        implementation: A key of `IMPLEMENTATIONS`; "compiled" differs from "eager" by rounding (see `CompiledCore`).

    Returns:
        [B, S, C, H] in the dtype of `streams`; arithmetic at least fp32.
    """
    with full_precision(streams):
        return IMPLEMENTATIONS[implementation](y, streams, post, comb)
