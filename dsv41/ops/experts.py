"""Products of the routed experts (ARCHITECTURE 7): three implementations of one function.

    out[n] = sum over the experts e of token n of  w2[e] ( weight * silu(min(w1[e] x, L)) * clamp(w3[e] x, -L, L) )

loop      Tokens sorted by expert, one expert after another. An empty expert costs nothing. The number of tokens per
          expert must be known on the host, which synchronises with a GPU.
grouped   Tokens sorted by expert, one grouped product per projection (`torch.nn.functional.grouped_mm`), whose bounds
          stay on the device. Tokens that visit no expert are sent to the first one with a weight of zero. Rows of all
          operands have to begin at multiples of 16 bytes, and float64 is not taken.
dense     Every expert on every token, then a sum: the reference. The result for a token does not even round differently
          when other tokens change.

Shapes: N tokens, H hidden, E experts, k experts per token, M expert width, R routed pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsv41.ops.precision import widen

# x [N, H], experts int64 [N, k] with -1 for none, weights [N, k], w1 and w3 [E, M, H], w2 [E, H, M], limit -> [N, H]
ExpertProducts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def _activate(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    gate, up = widen(gate), widen(up)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate).mul_(up)


def _activation_gradients(gate: Tensor, up: Tensor, limit: float, d_inner: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `_activate` with respect to both inputs, in their dtype."""
    wide_gate, wide_up = widen(gate), widen(up)
    if limit > 0:
        wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    d_gate = torch.ops.aten.silu_backward(d_inner * wide_up, wide_gate)
    d_up = F.silu(wide_gate).mul_(d_inner)
    if limit > 0:
        d_gate.masked_fill_(gate > limit, 0.0)
        d_up.masked_fill_(up.abs() > limit, 0.0)
    return d_gate.to(gate.dtype), d_up.to(up.dtype)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps its two inputs only, where autograd would keep each step in fp32."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return _activate(gate, up, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *_activation_gradients(gate, up, ctx.limit, gradients[0]), None


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, L)) * clamp(up, -L, L)``, at least fp32; L = 0 does not clamp."""
    return _SwiGLU.apply(gate, up, limit)


class _ExpertLoop(torch.autograd.Function):
    """Loop over experts; gradients of the stacked matrices are written expert by expert into one tensor each.

    Kept for backward, beside the inputs: the two projections [R, M] in the dtype of `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tokens: Tensor,
        counts: list[int],
        shares: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        limit: float,
    ) -> Tensor:
        gates = x.new_empty(len(tokens), w1.shape[1])
        ups = torch.empty_like(gates)
        out = shares.new_zeros(x.shape)
        start = 0
        for index, count in enumerate(counts):
            if count == 0:
                continue
            part = slice(start, start + count)
            rows = x.index_select(0, tokens[part])
            gate = torch.mm(rows, w1[index].t(), out=gates[part])
            up = torch.mm(rows, w3[index].t(), out=ups[part])
            inner = _activate(gate, up, limit).mul_(shares[part])
            out.index_add_(0, tokens[part], widen(inner.to(x.dtype) @ w2[index].t()))
            start += count
        ctx.save_for_backward(x, tokens, shares, w1, w2, w3, gates, ups)
        ctx.counts, ctx.limit = counts, limit
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, tokens, shares, w1, w2, w3, gates, ups = ctx.saved_tensors
        to_x, _, _, to_shares, *to_matrices, _ = ctx.needs_input_grad
        d_out = gradients[0]
        d_x = torch.zeros_like(x, dtype=shares.dtype) if to_x else None
        d_shares = torch.empty_like(shares) if to_shares else None
        d_w1, d_w2, d_w3 = (
            torch.empty_like(w) if needed else None for w, needed in zip((w1, w2, w3), to_matrices, strict=True)
        )
        start = 0
        for index, count in enumerate(ctx.counts):
            if count == 0:
                for d_matrix in (d_w1, d_w2, d_w3):
                    if d_matrix is not None:
                        d_matrix[index].zero_()
                continue
            part = slice(start, start + count)
            start += count
            own, gate, up, share = tokens[part], gates[part], ups[part], shares[part]
            d_rows = d_out.index_select(0, own).to(x.dtype)
            activated = _activate(gate, up, ctx.limit)
            if d_w2 is not None:
                torch.mm(d_rows.t(), (activated * share).to(x.dtype), out=d_w2[index])
            d_inner = widen(d_rows @ w2[index])
            if d_shares is not None:
                torch.sum(activated.mul_(d_inner), -1, keepdim=True, out=d_shares[part])
            d_gate, d_up = _activation_gradients(gate, up, ctx.limit, d_inner.mul_(share))
            rows = x.index_select(0, own) if d_w1 is not None or d_w3 is not None else x
            if d_w1 is not None:
                torch.mm(d_gate.t(), rows, out=d_w1[index])
            if d_w3 is not None:
                torch.mm(d_up.t(), rows, out=d_w3[index])
            if d_x is not None:
                d_x.index_add_(0, own, widen(torch.mm(d_gate, w1[index]).addmm_(d_up, w3[index])))
        return None if d_x is None else d_x.to(x.dtype), None, None, d_shares, d_w1, d_w2, d_w3, None


def _by_expert(experts: Tensor) -> Tensor:
    """Order of the flattened pairs by expert, -1 first; those of an expert keep the order of their tokens."""
    return experts.flatten().argsort(stable=True)


def looped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """Products by a loop over experts, each on its tokens."""
    nowhere, *counts = torch.bincount(experts.flatten() + 1, minlength=len(w1) + 1).tolist()
    order = _by_expert(experts)[nowhere:]
    shares = weights.flatten().index_select(0, order).unsqueeze(-1)
    return _ExpertLoop.apply(x, order // experts.shape[1], counts, shares, w1, w2, w3, limit)


def _groupable(dtype: torch.dtype, *sizes: int) -> bool:
    return dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)


def grouped_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """Products by one grouped product per projection; no value is read from the device.

    Raises:
        ValueError: A dtype or a size that torch's product does not take.
    """
    if not _groupable(x.dtype, *w1.shape[1:]):
        raise ValueError(
            'experts: "grouped" needs fp32, bf16 or fp16 and hidden_size and moe_intermediate_size whose rows are '
            f'multiples of 16 bytes, got {x.dtype}, {w1.shape[2]} and {w1.shape[1]}; "loop" takes any'
        )
    absent = experts < 0
    experts, weights = experts.masked_fill(absent, 0), weights.masked_fill(absent, 0.0)
    order = _by_expert(experts)
    # Ends of the experts' tokens.
    ends = torch.searchsorted(experts.flatten()[order], torch.arange(len(w1), device=x.device), right=True).int()
    rows = x.index_select(0, order // experts.shape[1])
    shares = weights.flatten().index_select(0, order).unsqueeze(-1)
    gate = F.grouped_mm(rows, w1.transpose(1, 2), offs=ends)
    up = F.grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    inner = (swiglu(gate, up, limit) * shares).to(x.dtype)
    result = F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    # Back into the tokens' order before the sum: adding rows up where they belong would not be deterministic on CUDA.
    return result.index_select(0, order.argsort()).view(*experts.shape, x.shape[1]).sum(1, dtype=weights.dtype)


def dense_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """Products of every expert on every token."""
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for index, (one, two, three) in enumerate(zip(w1.unbind(0), w2.unbind(0), w3.unbind(0), strict=True)):
        share = (weights * (experts == index)).sum(-1, keepdim=True)
        inner = swiglu(F.linear(x, one), F.linear(x, three), limit) * share
        out = out + widen(F.linear(inner.to(x.dtype), two))
    return out


IMPLEMENTATIONS: dict[str, ExpertProducts] = {
    "loop": looped_experts,
    "grouped": grouped_experts,
    "dense": dense_experts,
}


def expert_products(implementation: str, x: Tensor, width: int) -> ExpertProducts:
    """Implementation named by ``BackendConfig.experts``.

    Args:
        implementation: "auto" is "grouped" in bf16 on CUDA, where sizes allow it, and "loop" elsewhere.
        x: Tokens [N, H], in the dtype that the products have.
        width: M.
    """
    if implementation == "auto":
        # In other dtypes torch's grouped product on CUDA is a loop itself, and waits for the bounds.
        possible = x.is_cuda and x.dtype == torch.bfloat16 and _groupable(x.dtype, x.shape[1], width)
        implementation = "grouped" if possible else "loop"
    if implementation == "loop" and torch.compiler.is_exporting():
        implementation = "dense"  # how many tokens each expert has is known only when the program runs
    return IMPLEMENTATIONS[implementation]
