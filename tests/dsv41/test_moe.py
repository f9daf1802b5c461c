"""Mixture of experts: router, routed experts and shared expert against float64 loops over tokens.

The loops take one token and one expert at a time and know no sorting, stacking or masking; gradients come from
autograd through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.moe import DeepseekV41MoE, Experts, Router, SharedExpert, sqrt_softplus, swiglu

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]

HIDDEN, WIDTH, EXPERTS, TOPK, LIMIT = 6, 5, 7, 3, 0.8


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_config(tiny_config: MakeConfig, **overrides: Any) -> Any:
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "swiglu_limit": LIMIT,
        "routed_scaling_factor": 1.7,
    }
    return tiny_config(**(fields | overrides)).text_config


def fill(module: torch.nn.Module, seed: int = 500) -> None:
    with torch.no_grad():
        for offset, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + offset))


# ------------------------------------------------------------------ router


def identity_router(config: Any) -> Router:
    """A router whose logits are its input."""
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(router.weight.shape[0]))
    return router


def score_by_hand(logit: float) -> float:
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def route_by_hand(logits: list[float], bias: list[float], topk: int, normalise: bool, scale: float) -> dict[int, float]:
    scores = [score_by_hand(logit) for logit in logits]
    chosen = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e]))[:topk]
    total = sum(scores[e] for e in chosen) + 1e-20 if normalise else 1.0
    return {e: scores[e] / total * scale for e in chosen}


def routed(router: Router, x: Tensor, image_mask: Tensor | None = None) -> list[dict[int, float]]:
    experts, weights, _ = router(x, image_mask)
    rows = []
    for row, shares in zip(experts.tolist(), weights.detach().tolist(), strict=True):
        assert len(set(row)) == len(row)
        rows.append(dict(zip(row, shares, strict=True)))
    return rows


def assert_same_routes(ours: list[dict[int, float]], expected: list[dict[int, float]], rel: float = 1e-5) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


def test_the_score_is_finite_everywhere_and_equals_the_formula_where_representable() -> None:
    logits = torch.cat((torch.arange(-200.0, 201.0), torch.tensor([-103.9, -104.1, -87.5, 19.99, 20.01, 0.3])))
    logits.requires_grad_()
    scores = sqrt_softplus(logits)
    assert scores.isfinite().all()
    assert (scores >= 0).all()
    scores.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    for logit, score, slope in zip(logits.tolist(), scores.tolist(), logits.grad.tolist(), strict=True):
        expected = score_by_hand(logit)
        if logit < -80:  # softplus is below fp32's normal numbers, or nearly so
            assert 0 <= score < 1e-17
            assert 0 <= slope < 1e-17
        else:
            assert score == pytest.approx(expected, rel=1e-5)
            assert slope == pytest.approx(1 / (1 + math.exp(-logit)) / (2 * expected), rel=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_router_stays_finite_for_extreme_logits(tiny_config: MakeConfig, normalise: bool) -> None:
    config = make_config(tiny_config, hidden_size=EXPERTS, norm_topk_prob=normalise)
    router = identity_router(config)
    rows = [[level + 0.01 * e for e in range(EXPERTS)] for level in (-200, -110, -104, -100, -90, -50, 0, 50, 200)]
    rows += [[-200, -150, -100, -50, 0, 100, 200], [200, -200, 200, -200, 199, -200, -200]]
    x = torch.tensor(rows, requires_grad=True)
    weights = router(x).weights
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    (weights * random(*weights.shape, seed=0)).sum().backward()
    for gradient in (x.grad, router.weight.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
    exact = [route_by_hand([float(v) for v in row], [0.0] * EXPERTS, TOPK, normalise, 1.7) for row in x.tolist()]
    # From the sixth row on all chosen scores are normal fp32 numbers, and far above the 1e-20 of the denominator.
    assert_same_routes(routed(router, x)[5:9], exact[5:9])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_routes_equal_a_loop_over_the_formula(
    tiny_config: MakeConfig, normalise: bool, topk: int, scale: float
) -> None:
    config = make_config(tiny_config, norm_topk_prob=normalise, num_experts_per_tok=topk, routed_scaling_factor=scale)
    router = Router(config)
    fill(router)
    x = random(12, HIDDEN, seed=1)
    logits = (x.double() @ router.weight.detach().double().T).tolist()
    # One expert per token is never normalised: its weight would be the constant `scale`, and the router untrainable.
    expected = [route_by_hand(row, [0.0] * EXPERTS, topk, normalise and topk > 1, scale) for row in logits]
    ours = routed(router, x)
    assert_same_routes(ours, expected)
    sums = [sum(shares.values()) for shares in ours]
    if normalise and topk > 1:
        assert sums == pytest.approx([scale] * 12, rel=1e-5)
    else:
        assert max(sums) - min(sums) > 0.1


def test_the_bias_steers_the_selection_and_never_the_weights(tiny_config: MakeConfig) -> None:
    router = Router(make_config(tiny_config, norm_topk_prob=False))
    fill(router)
    x = random(12, HIDDEN, seed=2).requires_grad_()
    logits = (x.detach().double() @ router.weight.detach().double().T).tolist()
    before = routed(router, x)
    router.bias.copy_(torch.tensor([0.0, 5.0, -5.0, 0.7, 0.0, -0.4, 0.2]))
    after = routed(router, x)
    assert_same_routes(after, [route_by_hand(row, router.bias.tolist(), TOPK, False, 1.7) for row in logits])
    for row, shares in zip(logits, after, strict=True):
        assert 1 in shares
        assert 2 not in shares
        for expert, weight in shares.items():
            assert weight == pytest.approx(1.7 * score_by_hand(row[expert]), rel=1e-5)
    assert [set(shares) for shares in before] != [set(shares) for shares in after]
    experts, weights, _ = router(x)
    weights.sum().backward()
    # The weights are functions of the logits of the chosen experts alone; the bias is none of their inputs.
    assert router.weight.grad is not None
    visited = set(experts.flatten().tolist())
    for expert in range(EXPERTS):
        assert router.weight.grad[expert].any() == (expert in visited)


def test_the_biases_are_persistent_fp32_buffers_without_gradient(tiny_config: MakeConfig) -> None:
    router = Router(make_config(tiny_config))
    assert {name for name, _ in router.named_parameters()} == {"weight"}
    assert set(router.state_dict()) == {"weight", "bias", "bias_vl"}
    for buffer in (router.bias, router.bias_vl):
        assert buffer.dtype == torch.float32
        assert buffer.shape == (EXPERTS,)
        assert not buffer.requires_grad
    router(random(4, HIDDEN, seed=3))[1].sum().backward()
    assert router.bias.grad is None
    assert router.bias_vl.grad is None


def test_the_biases_stay_fp32_in_a_bf16_model(tiny_model: MakeModel) -> None:
    model = tiny_model()
    model.cast_parameters(torch.bfloat16)
    for block in model.model.layers:
        assert block.ffn.gate.weight.dtype == torch.bfloat16
        assert block.ffn.gate.bias.dtype == block.ffn.gate.bias_vl.dtype == torch.float32


def test_bias_vl_acts_on_image_tokens_only(tiny_config: MakeConfig) -> None:
    router = Router(make_config(tiny_config))
    fill(router)
    router.bias.copy_(torch.tensor([3.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0]))
    router.bias_vl.copy_(torch.tensor([-3.0, 0.0, 3.0, 0.0, 0.0, 0.3, 0.0]))
    x = random(10, HIDDEN, seed=4)
    image = torch.tensor([True, False, False, True, True, False, True, False, False, True])
    logits = (x.double() @ router.weight.detach().double().T).tolist()
    expected = [
        route_by_hand(row, (router.bias_vl if is_image else router.bias).tolist(), TOPK, True, 1.7)
        for row, is_image in zip(logits, image.tolist(), strict=True)
    ]
    assert_same_routes(routed(router, x, image), expected)
    text = routed(router, x)
    assert_same_routes(text, [route_by_hand(row, router.bias.tolist(), TOPK, True, 1.7) for row in logits])
    assert_same_routes(routed(router, x, torch.zeros(10, dtype=torch.bool)), text)
    for token, is_image in enumerate(image.tolist()):
        assert (0 in expected[token]) != is_image
        assert 0 in text[token]


def test_the_router_computes_in_fp32_for_bf16_and_under_autocast(tiny_config: MakeConfig) -> None:
    router = Router(make_config(tiny_config))
    fill(router)
    x = random(12, HIDDEN, seed=5).bfloat16()
    exact = router(x.float())
    for experts, weights, scores in (router(x), _under_autocast(router, x.float())):
        assert scores.dtype == torch.float32
        assert weights.dtype == torch.float32
        assert torch.equal(experts, exact[0])
        assert torch.equal(weights, exact[1])


def _under_autocast(router: Router, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return router(x)


def test_router_gradients_equal_finite_differences(tiny_config: MakeConfig) -> None:
    router = Router(make_config(tiny_config)).double()
    fill(router)
    x = random(5, HIDDEN, seed=6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, _weight: router(x)[1], (x, router.weight))


# ------------------------------------------------------------------ experts


def expert_by_hand(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """One token through one expert, channel by channel."""
    inner = []
    for gate_row, up_row in zip(w1, w3, strict=True):
        gate, up = (gate_row * x).sum(), (up_row * x).sum()
        if limit > 0:
            gate = gate if float(gate.detach()) <= limit else gate * 0 + limit
            if abs(float(up.detach())) > limit:
                up = up * 0 + math.copysign(limit, float(up.detach()))
        inner.append(gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([(row * torch.stack(inner)).sum() for row in w2])


def experts_by_hand(
    x: Tensor, choice: list[list[int]], weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    rows = []
    for token, chosen in enumerate(choice):
        total = torch.zeros_like(x[token])
        for slot, expert in enumerate(chosen):
            if expert >= 0:
                result = expert_by_hand(x[token], w1[expert], w2[expert], w3[expert], limit)
                total = total + weights[token, slot] * result
        rows.append(total)
    return torch.stack(rows)


# Experts 3 and 6 stay empty, token 4 visits none, expert 0 gets most tokens, and no token has its experts sorted.
CHOICE = [[5, 0, 1], [0, 4, 2], [1, 0, 5], [4, 0, 1], [-1, -1, -1], [0, 2, 5], [2, 5, 0], [1, 4, 5], [5, 1, 0]]


def make_experts(tiny_config: MakeConfig, backend: Any, limit: float = LIMIT) -> Experts:
    experts = Experts(make_config(tiny_config, swiglu_limit=limit), BackendConfig(experts=backend))
    fill(experts)
    return experts


@pytest.mark.parametrize("backend", ["loop", "dense"])
@pytest.mark.parametrize("limit", [LIMIT, 0.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-5)])
def test_experts_and_all_their_gradients_equal_a_loop(
    tiny_config: MakeConfig, backend: str, limit: float, dtype: torch.dtype, tolerance: float
) -> None:
    experts = make_experts(tiny_config, backend, limit).to(dtype)
    x = random(9, HIDDEN, seed=7, dtype=dtype).requires_grad_()
    weights = (random(9, TOPK, seed=8, dtype=dtype).abs() + 0.1).requires_grad_()
    incoming = random(9, HIDDEN, seed=9)
    matrices = (experts.w1, experts.w2, experts.w3)
    ours = experts(x, torch.tensor(CHOICE), weights)
    assert ours.dtype == dtype
    gradients = torch.autograd.grad(ours, (x, weights, *matrices), incoming.to(dtype))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weights, *matrices)]
    theirs = experts_by_hand(exact[0], CHOICE, exact[1], *exact[2:], limit)
    their_gradients = torch.autograd.grad(theirs, exact, incoming.double())
    torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    for name, mine, reference in zip(("x", "weights", "w1", "w2", "w3"), gradients, their_gradients, strict=True):
        assert reference.abs().max() > 0.1, name
        torch.testing.assert_close(
            mine.double(), reference, atol=10 * tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    for gradient in gradients[2:]:
        for empty in (3, 6):
            assert torch.equal(gradient[empty], torch.zeros_like(gradient[empty]))
        for visited in (0, 1, 2, 4, 5):
            assert gradient[visited].any()
    assert not ours[4].any()
    assert not gradients[0][4].any()


@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_without_any_routed_token_experts_give_zero_and_zero_gradients(tiny_config: MakeConfig, backend: str) -> None:
    # A rank whose rows are all padding must still hand a gradient to the optimiser and to its collectives.
    module = DeepseekV41MoE(make_config(tiny_config), BackendConfig(experts=backend))  # type: ignore[arg-type]
    fill(module)
    x = random(2, 3, HIDDEN, seed=10)
    out, _ = module(x, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(out, module.shared_experts(x.flatten(0, 1)).view_as(x))
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == name.startswith("shared_experts"), name


@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_an_expert_that_takes_every_token_and_one_token_alone(tiny_config: MakeConfig, backend: str) -> None:
    experts = make_experts(tiny_config, backend).double()
    matrices = [tensor.detach() for tensor in (experts.w1, experts.w2, experts.w3)]
    for x, choice in (
        (random(4, HIDDEN, seed=11, dtype=torch.float64), [[6], [6], [6], [6]]),
        (random(1, HIDDEN, seed=12, dtype=torch.float64), [[2]]),
    ):
        weights = torch.full((len(x), 1), 0.3, dtype=torch.float64)
        expected = experts_by_hand(x, choice, weights, *matrices, LIMIT)
        torch.testing.assert_close(experts(x, torch.tensor(choice), weights), expected, atol=1e-12, rtol=1e-12)


def test_swiglu_clamps_the_gate_above_and_the_linear_part_on_both_sides() -> None:
    gate = torch.tensor([9.0, 0.5, -9.0, 9.0, 1.0, 1.0])
    up = torch.tensor([0.5, 9.0, 0.5, -9.0, -9.0, 2.0])

    def silu(value: float) -> float:
        return value / (1 + math.exp(-value))

    clamped = [silu(2) * 0.5, silu(0.5) * 2, silu(-9) * 0.5, silu(2) * -2, silu(1) * -2, silu(1) * 2]
    assert swiglu(gate, up, 2.0).tolist() == pytest.approx(clamped, rel=1e-6)
    free = [silu(float(g)) * float(u) for g, u in zip(gate, up, strict=True)]
    assert swiglu(gate, up, 0.0).tolist() == pytest.approx(free, rel=1e-6)
    assert swiglu(gate.bfloat16(), up.bfloat16(), 2.0).dtype == torch.float32


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("limit", [LIMIT, 0.0])
def test_the_shared_expert_equals_a_loop_and_clamps_too(tiny_config: MakeConfig, count: int, limit: float) -> None:
    shared = SharedExpert(make_config(tiny_config, n_shared_experts=count, swiglu_limit=limit)).double()
    assert shared.w1.weight.shape == shared.w3.weight.shape == (count * WIDTH, HIDDEN)
    assert shared.w2.weight.shape == (HIDDEN, count * WIDTH)
    fill(shared)
    x = random(8, HIDDEN, seed=13, dtype=torch.float64).requires_grad_()
    incoming = random(8, HIDDEN, seed=14, dtype=torch.float64)
    matrices = (shared.w1.weight, shared.w2.weight, shared.w3.weight)
    gate, up = (x @ shared.w1.weight.T).detach(), (x @ shared.w3.weight.T).detach()
    for beyond in (gate > LIMIT, gate < -LIMIT, up > LIMIT, up < -LIMIT):
        assert beyond.any()
    ours = shared(x)
    exact = [tensor.detach().clone().requires_grad_() for tensor in (x, *matrices)]
    theirs = torch.stack([expert_by_hand(token, *exact[1:], limit) for token in exact[0]])
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    gradients = torch.autograd.grad(ours, (x, *matrices), incoming)
    for mine, reference in zip(gradients, torch.autograd.grad(theirs, exact, incoming), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-11, rtol=1e-11)


# ------------------------------------------------------------------ the whole layer


@pytest.mark.parametrize("backend", ["loop", "dense"])
@pytest.mark.parametrize("shared", [1, 2])
def test_the_layer_equals_a_loop_over_live_tokens(tiny_config: MakeConfig, backend: str, shared: int) -> None:
    config = make_config(tiny_config, n_shared_experts=shared)
    module = DeepseekV41MoE(config, BackendConfig(experts=backend)).double()  # type: ignore[arg-type]
    fill(module)
    module.gate.bias.copy_(torch.tensor([0.5, 0.0, -0.5, 0.0, 0.2, 0.0, 0.1]))
    module.gate.bias_vl.copy_(torch.tensor([-0.9, 0.0, 0.5, 0.0, 0.0, 0.0, 0.1]))
    x = random(2, 5, HIDDEN, seed=15, dtype=torch.float64)
    live = torch.tensor([[True] * 5, [True, True, True, False, False]])
    image = torch.tensor([[False, True, True, False, False], [True, False, False, False, False]])
    ours, _ = module(x, live, image)
    shared_matrices = [getattr(module.shared_experts, name).weight.detach() for name in ("w1", "w2", "w3")]
    routed_matrices = [getattr(module.experts, name).detach() for name in ("w1", "w2", "w3")]
    for b in range(2):
        for s in range(5):
            token = x[b, s]
            expected = expert_by_hand(token, *shared_matrices, LIMIT)
            if live[b, s]:
                bias = module.gate.bias_vl if image[b, s] else module.gate.bias
                logits = (module.gate.weight.detach() @ token).tolist()
                for expert, weight in route_by_hand(logits, bias.tolist(), TOPK, True, 1.7).items():
                    matrices = (matrix[expert] for matrix in routed_matrices)
                    expected = expected + weight * expert_by_hand(token, *matrices, LIMIT)
            torch.testing.assert_close(ours[b, s].detach(), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_padded_tokens_visit_the_shared_expert_only(tiny_config: MakeConfig, backend: str) -> None:
    module = DeepseekV41MoE(make_config(tiny_config), BackendConfig(experts=backend))  # type: ignore[arg-type]
    fill(module)
    x = random(2, 5, HIDDEN, seed=16)
    live = torch.tensor([[True] * 5, [True, True, False, False, False]])
    out, _ = module(x, live)
    shared = module.shared_experts(x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(out[~live], shared[~live], atol=1e-6, rtol=1e-6)
    assert ((out - shared)[live].abs().amax(-1) > 1e-2).all()
    routed_parameters = [*module.gate.parameters(), *module.experts.parameters()]
    from_padding = torch.autograd.grad(out[~live].sum(), routed_parameters, retain_graph=True)
    assert not any(gradient.any() for gradient in from_padding)
    from_live = torch.autograd.grad(out[live].sum(), routed_parameters)
    assert all(gradient.any() for gradient in from_live)


@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_bf16_results_are_accumulated_in_fp32(tiny_config: MakeConfig, backend: str) -> None:
    # Every expert's inner value is 16 (silu(16) rounds to it); the down projections make 256, 1 and, shared, 1.
    # In bf16 256 + 1 is 256 again, whichever way round the three are added in pairs with 256.
    config = make_config(
        tiny_config,
        hidden_size=1,
        moe_intermediate_size=1,
        n_routed_experts=2,
        num_experts_per_tok=2,
        swiglu_limit=0.0,
        routed_scaling_factor=2.0,
    )
    module = DeepseekV41MoE(config, BackendConfig(experts=backend)).bfloat16()  # type: ignore[arg-type]
    with torch.no_grad():
        module.gate.weight.zero_()  # equal scores: weights 1/2 each, times the scaling factor
        for owner in (module.experts, module.shared_experts):
            for name, value in (("w1", 16.0), ("w3", 1.0)):
                matrix = getattr(owner, name)
                getattr(matrix, "weight", matrix).fill_(value)
        module.experts.w2.copy_(torch.tensor([16.0, 1 / 16]).view(2, 1, 1))
        module.shared_experts.w2.weight.fill_(1 / 16)
    x = torch.ones(1, 3, 1, dtype=torch.bfloat16)
    summed = module.experts(x.view(3, 1), torch.tensor([[0, 1], [1, 0], [1, -1]]), torch.ones(3, 2))
    assert summed.dtype == torch.float32
    assert summed.flatten().tolist() == [257.0, 257.0, 1.0]
    out, _ = module(x, torch.ones(1, 3, dtype=torch.bool))
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [258.0] * 3


@pytest.mark.parametrize("backend", ["loop", "dense"])
def test_the_routing_weight_enters_before_the_down_projection(tiny_config: MakeConfig, backend: str) -> None:
    config = make_config(
        tiny_config,
        hidden_size=1,
        moe_intermediate_size=1,
        n_routed_experts=1,
        num_experts_per_tok=1,
        swiglu_limit=0.0,
    )
    experts = Experts(config, BackendConfig(experts=backend)).bfloat16()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter, value in ((experts.w1, 16.0), (experts.w3, 1.0), (experts.w2, 16.0)):
            parameter.fill_(value)
    weights = torch.tensor([[1 / 3]])
    ours = experts(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[0]]), weights)
    # 16 / 3 is rounded to bf16 (5.34375) and then multiplied by 16; scaling afterwards would give 85.333 in fp32.
    assert ours.item() == 85.5
