"""Mixture of experts with a sqrt-softplus router, selection-only biases and balanced load (ARCHITECTURE 7).

Balance (DeepSeek-V3, section 2.1.2) needs no auxiliary loss: after each optimizer step an expert's selection bias moves
by a fixed amount, down if it received more tokens than the mean in that step, up if fewer. Biases select only, so
this trains nothing else. Text and image tokens have separate biases, moved by their own loads. The optional
sequence-wise loss acts inside a single row, which a bias cannot.

Shapes: N tokens (batch and sequence flattened), H hidden, E experts, k experts per token, M expert width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41TextConfig
from dsv41.initialization import NamedDraws
from dsv41.ops.experts import expert_products, swiglu
from dsv41.ops.precision import full_precision, widen


def sqrt_softplus(x: Tensor) -> Tensor:
    """``sqrt(softplus(x))`` with a finite gradient for any finite `x`.

    Below -40 it is exp(x / 2) to rounding. Written that way, the gradient does not pass through the reciprocal of a
    root that has underflowed.
    """
    low = (0.5 * x.clamp(max=-40.0)).exp()
    return torch.where(x < -40.0, low, F.softplus(x.clamp(min=-40.0)).sqrt())


class Routing(NamedTuple):
    """Routing decision for a batch of tokens.

    Attributes:
        experts: int64 [N, k].
        weights: Weights of the experts' results [N, k], at least fp32.
        scores: Scores of all experts [N, E], at least fp32, without biases.
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


class RouterReport(NamedTuple):
    """Load and balance loss of a layer; returned, so that recomputing a block in backward counts nothing twice.

    Attributes:
        load: Tokens per expert, int64 [2, E]: text, image. Padding visits none.
        balance_loss: `sequence_balance_loss` of the layer, a scalar; None where it is not trained.
    """

    load: Tensor
    balance_loss: Tensor | None = None


def expert_load(experts: Tensor, count: int, image_mask: Tensor | None = None) -> Tensor:
    """Number of tokens that visit each expert.

    Args:
        experts: int64 [N, k], -1 where a token visits none.
        count: Number E of experts.
        image_mask: Bool [N], true for image tokens; None is all text.

    Returns:
        int64 [2, E]: text tokens, image tokens.
    """
    # One extra bin for visits of no expert; not bincount, which synchronises with a GPU.
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

    A step without load changes nothing.
    """
    # In integers: a rounded mean, as on a GPU by the product with 1 / E, may equal no expert's load.
    bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype), alpha=rate)


def imbalance(load: Tensor) -> Tensor:
    """Load of the busiest expert over the mean, of `load` [..., E]: 1 is even, E / k at worst; NaN without tokens."""
    wide = load.double()
    return wide.amax(-1) / wide.mean(-1)


class Router(nn.Module):
    """Router: selects experts by ``score + bias`` and weighs them by the score alone.

    Args:
        config: Uses hidden_size, n_routed_experts, num_experts_per_tok, norm_topk_prob, routed_scaling_factor.

    Attributes:
        bias: fp32 buffer [E], selection bias of text tokens; moved by load balancing, never by gradients.
        bias_vl: The same for image tokens.
    """

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        self.topk = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob and self.topk > 1
        self.scale = config.routed_scaling_factor
        self.initializer_range = config.initializer_range
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))
        self.register_buffer("bias_vl", torch.zeros(config.n_routed_experts, dtype=torch.float32))
        self.init_weights(NamedDraws())

    def init_weights(self, draws: NamedDraws) -> None:
        """Draw the matrix, set biases to zero."""
        draws.normal_(self.weight, "weight", self.initializer_range)
        self.bias.zero_()
        self.bias_vl.zero_()

    def forward(self, x: Tensor, image_mask: Tensor | None = None) -> Routing:
        """Experts and weights of each token.

        Args:
            x: [N, H].
            image_mask: Bool [N], true for image tokens; None is all text.
        """
        with full_precision(x):
            wide = widen(x)
            scores = sqrt_softplus(F.linear(wide, self.weight.to(wide.dtype)))
        with torch.no_grad():
            bias = self.bias
            if image_mask is not None:
                bias = torch.where(image_mask.unsqueeze(-1), self.bias_vl, self.bias)
            experts = (scores + bias.to(scores.dtype)).topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * self.scale, scores)


class Experts(nn.Module):
    """Routed experts, stacked: w1 gate and w3 up [E, M, H], w2 down [E, H, M].

    Args:
        config: Uses n_routed_experts, moe_intermediate_size, hidden_size, swiglu_limit, initializer_range.
        backend: Uses `experts`.
    """

    def __init__(self, config: DeepseekV41TextConfig, backend: BackendConfig) -> None:
        super().__init__()
        count, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.initializer_range = config.initializer_range
        self.implementation = backend.experts
        self.w1 = nn.Parameter(torch.empty(count, width, hidden))
        self.w2 = nn.Parameter(torch.empty(count, hidden, width))
        self.w3 = nn.Parameter(torch.empty(count, width, hidden))
        self.init_weights(NamedDraws())

    def init_weights(self, draws: NamedDraws) -> None:
        """Draw each expert by its index, so that more experts leave the first ones unchanged."""
        for name in ("w1", "w2", "w3"):
            draws.normal_stack_(getattr(self, name), name, self.initializer_range)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts.

        Args:
            x: [N, H].
            experts: int64 [N, k]; -1 where a token visits no expert.
            weights: [N, k], at least fp32.

        Returns:
            [N, H], at least fp32.
        """
        operands: list[Tensor] = [x, self.w1, self.w2, self.w3]
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            operands = [operand.to(torch.get_autocast_dtype(device)) for operand in operands]
        x, w1, w2, w3 = operands
        with full_precision(x):
            products = expert_products(self.implementation, x, w1.shape[1])
            return products(x, experts, weights, w1, w2, w3, self.limit)


class SharedExpert(nn.Module):
    """Shared expert that every token visits; clamped like the routed ones.

    Args:
        config: Uses hidden_size, moe_intermediate_size, n_shared_experts, swiglu_limit.
    """

    def __init__(self, config: DeepseekV41TextConfig) -> None:
        super().__init__()
        width = config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Expert output [N, H] for `x` [N, H], in its dtype."""
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class DeepseekV41MoE(nn.Module):
    """Mixture of experts: router, routed experts and the shared expert.

    Args:
        config: Text configuration.
        backend: Uses `experts`.
    """

    def __init__(self, config: DeepseekV41TextConfig, backend: BackendConfig) -> None:
        super().__init__()
        self.count = config.n_routed_experts
        self.trains_balance = config.router_balance_loss_weight > 0
        self.gate = Router(config)
        self.experts = Experts(config, backend)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, token_mask: Tensor, image_mask: Tensor | None = None) -> tuple[Tensor, RouterReport]:
        """Output of the layer, and a report of its routing.

        Args:
            x: [B, S, H].
            token_mask: Bool [B, S]; padding (false) visits no routed expert, only the shared one.
            image_mask: Bool [B, S] of image tokens, or None.

        Returns:
            [B, S, H] in the dtype of `x`; routed and shared results are summed at least in fp32, then cast. And the
            report of the routing; the balance loss in training mode with gradients only.
        """
        flat = x.flatten(0, 1)
        flat_images = None if image_mask is None else image_mask.flatten()
        experts, weights, scores = self.gate(flat, flat_images)
        experts = experts.masked_fill(~token_mask.flatten().unsqueeze(-1), -1)
        out = self.experts(flat, experts, weights) + widen(self.shared_experts(flat))
        report = RouterReport(expert_load(experts, self.count, flat_images))
        if self.trains_balance and self.training and torch.is_grad_enabled():
            rows = x.shape[:2]
            loss = sequence_balance_loss(scores.unflatten(0, rows), experts.unflatten(0, rows))
            report = report._replace(balance_loss=loss)
        return out.to(x.dtype).view_as(x), report
