"""Single-pass manifold-constrained hyper-connections (ARCHITECTURE 3; mHC, arXiv:2512.24880).

A block carries C residual streams. Each site (attention, MoE) predicts from the streams it sees
  pre  [C]     how the NEXT site reads: x = sum_c pre[c] * stream[c],
  post [C]     how its own output y is written into each stream,
  comb [C, C]  how the streams mix among themselves, a doubly stochastic matrix.
That `pre` acts one site later is what makes it single-pass: streams are read once for both coefficients and mixing.

A site goes over the streams twice: `_Read` before its sublayer, `_Mix` behind it. Both take a few tokens at a time, so
that what an operation has just read is still in the cache for the next, and so that bf16 streams are widened a few at a
time. For backward they keep their inputs, not what they made of them.

Shapes: B batch, S sequence, N = B * S tokens, C streams, H hidden, R = C * (2 + C) coefficients. Coefficients are at
least fp32 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsv41.backend import BackendConfig
from dsv41.compiled import CompiledCore
from dsv41.config import DeepseekV41TextConfig
from dsv41.initialization import NamedDraws
from dsv41.precision import full_precision, widen
from dsv41.sharding import copy_rows_

CHUNK_BYTES = 1 << 20  # of fp32 streams at a time: what a core's own cache holds
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
    """Tokens to take at a time of streams [B, S, C, H]."""
    tokens, per_token = streams.shape[:2].numel(), 4 * streams.shape[2:].numel()
    size = max(1, (CHUNK_BYTES if streams.device.type == "cpu" else GPU_CHUNK_BYTES) // per_token)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _workspace(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Where to compute in `dtype` what `target` is to hold: `target` itself, if it is of that type."""
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)


class _Read(torch.autograd.Function):
    """``x = sum_c pre[c] * stream[c]`` and ``mixes = (f @ fn^T) * rsqrt(mean(f^2) + eps)`` of the flat streams f.

    `fn` is [R, C * H], `mixes` [B, S, R], the other arguments and results as in `HyperConnection.forward`.
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


def _expand_eager(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    out: Tensor = _Mix.apply(streams, comb, y, post)
    return out


def _expand_core(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`expand` written out, for a compiler that makes one pass of it; eager, the product is C times the streams."""
    mixed = (comb.unsqueeze(-1) * widen(streams).unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * widen(y).unsqueeze(-2) + mixed).to(streams.dtype)


# What every site of this process writes with. Compilation caches belong to the process, so the switch does too.
_expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _expand_eager
_EXPAND_COMPILED = False


def compile_expand() -> None:
    """Swap the core of `expand` in this process for a ``torch.compile(dynamic=False)`` one, once.

    See `CompiledCore` for shapes, rounding and what happens without a compiler. The other side of a site stays eager:
    compiled, Sinkhorn takes a minute to compile and then more time and memory, and reading saves widened streams.
    """
    global _expand, _EXPAND_COMPILED
    if not _EXPAND_COMPILED:
        _expand = CompiledCore("mHC expansion", _expand_core, _expand_eager)
        _EXPAND_COMPILED = True


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


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output and mix: ``out[o] = post[o] * y + sum_i comb[i, o] * stream[i]``.

    Args:
        y: [B, S, H].
        streams: [B, S, C, H].
        post: [B, S, C], fp32; float64 for float64 streams.
        comb: [B, S, C_in, C_out] in the dtype of `post`.

    Returns:
        [B, S, C, H] in the dtype of `streams`; arithmetic at least fp32.
    """
    with full_precision(streams):
        return _expand(y, streams, post, comb)


class Residual(nn.Module):
    """How one site (attention, MoE) reads from the residual streams and writes to them.

    The interface of the ``residual`` switch: ``x, pre, post, comb = site(streams, carried_pre)``, then
    ``streams = site.write(y, streams, post, comb)`` with the sublayer's output y. What `post` and `comb` hold is the
    site's own matter.
    """

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """The streams [B, S, C, H] with a sublayer's output `y` [B, S, H] in them."""
        raise NotImplementedError


class PlainResidual(Residual):
    """An ordinary residual connection: the one stream is read as it is, and the result added to it."""

    def forward(self, streams: Tensor, carried_pre: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The stream [B, S, H] of `streams` [B, S, 1, H]; what is carried stays; no coefficients."""
        return streams.squeeze(2), carried_pre, None, None

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """See `Residual.write`."""
        return streams + y.unsqueeze(2)


class HyperConnection(Residual):
    """mHC: reads with the `pre` of the site before, and predicts the coefficients of its own site.

    Args:
        config: Uses hidden_size, hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps.
        backend: Uses `compile_hc`.
    """

    # What is predicted for a stream's own weight at first: exp(4) against 1, so streams mostly keep to themselves, yet
    # every entry has a gradient.
    kept = 4.0

    def __init__(self, config: DeepseekV41TextConfig, backend: BackendConfig) -> None:
        super().__init__()
        if backend.compile_hc:
            compile_expand()
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
        base[2 * streams :].view(streams, streams).fill_diagonal_(self.kept)
        copy_rows_(self.base, base)

    def combined(self, logits: Tensor) -> Tensor:
        """Mixing matrices [..., C_in, C_out] from what was predicted for them."""
        return sinkhorn(logits, self.iterations, self.eps)

    def write(self, y: Tensor, streams: Tensor, post: Tensor | None, comb: Tensor | None) -> Tensor:
        """See `expand`."""
        assert post is not None
        assert comb is not None
        return expand(y, streams, post, comb)

    def forward(self, streams: Tensor, carried_pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the site reads, and the coefficients that follow from the same streams.

        Args:
            streams: [B, S, C, H].
            carried_pre: `pre` of the site before [B, S, C], fp32; float64 for float64 streams.

        Returns:
            x [B, S, H], `streams` collapsed with `carried_pre`, in their dtype; pre [B, S, C] in (hc_eps, 1 + hc_eps),
            post [B, S, C] in (0, 2) and comb [B, S, C_in, C_out], in the dtype of `carried_pre`.
        """
        with full_precision(streams):
            x, mixes = _Read.apply(streams, carried_pre, self.fn, self.norm_eps)
            base, scale = self.base.to(mixes.dtype), self.scale.to(mixes.dtype)
            count = self.streams
            parts = (count, count, count * count)
            per_row = torch.cat([one.expand(size) for one, size in zip(scale, parts, strict=True)])
            # One fused multiply-add, as in the release; multiply then add rounds differently.
            logits = torch.addcmul(base, mixes, per_row)
            pre, post, comb = logits.split(parts, dim=-1)
            comb = self.combined(comb.unflatten(-1, (count, count)))
            return x, pre.sigmoid() + self.eps, 2 * post.sigmoid(), comb


class UnconstrainedHyperConnection(HyperConnection):
    """Hyper-connections (arXiv:2409.19606) in the single-pass form: mixing matrices are not projected.

    Everything else is mHC's, so that a comparison shows what the projection does.
    """

    kept = 1.0  # the identity, exactly

    def combined(self, logits: Tensor) -> Tensor:
        """The prediction itself."""
        return logits


def build_residual(config: DeepseekV41TextConfig, backend: BackendConfig) -> Residual:
    """The site that ``config.residual`` names."""
    if config.residual == "plain":
        return PlainResidual()
    return {"mhc": HyperConnection, "hyper_connections": UnconstrainedHyperConnection}[config.residual](config, backend)
