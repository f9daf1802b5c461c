"""The routed experts' products: every implementation against a float64 loop over tokens; what is kept and skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dsv41 import BackendConfig, DeepseekV41TextConfig
from dsv41.moe import Experts
from dsv41.ops.experts import IMPLEMENTATIONS, expert_products, swiglu

TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK, LIMIT = 29, 16, 8, 9, 3, 0.8
EMPTY = (0, 3, 8)  # the first and the last are among them
NAMES = ("x", "weights", "w1", "w2", "w3")


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """x, weights, w1, w2, w3; and experts, of which some are empty, where two tokens visit none or one only."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = random(TOKENS, HIDDEN).to(dtype)
    weights = random(TOKENS, TOPK).abs().to(torch.promote_types(dtype, torch.float32))
    shapes = ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    matrices = [random(*shape).mul(0.4).to(dtype) for shape in shapes]
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, list(EMPTY)] = -1
    experts = scores.topk(TOPK).indices
    experts[4] = -1
    experts[7, 1:] = -1
    return [tensor.requires_grad_() for tensor in (x, weights, *matrices)], experts


def by_hand(leaves: list[Tensor], experts: Tensor, limit: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One token and one expert at a time, in float64."""
    x, weights, w1, w2, w3 = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rows = []
    for token in range(TOKENS):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for slot, expert in enumerate(experts[token].tolist()):
            if expert >= 0:
                gate, up = w1[expert] @ x[token], w3[expert] @ x[token]
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                total = total + w2[expert] @ (gate * gate.sigmoid() * up) * weights[token, slot]
        rows.append(total)
    out = torch.stack(rows)
    return out.detach(), torch.autograd.grad(out, exact, incoming().double())


def incoming() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "limit", "bound"),
    [
        (torch.float64, LIMIT, 1e-14),
        (torch.float64, 0.0, 1e-14),
        (torch.float32, LIMIT, 1e-6),
        (torch.float32, 0.0, 1e-6),
        (torch.bfloat16, 0.0, 1e-2),  # without the clamp, on whose two sides a rounded value may lie
    ],
    ids=str,
)
def test_values_and_all_gradients_equal_a_loop_over_tokens(
    name: str, dtype: torch.dtype, limit: float, bound: float
) -> None:
    leaves, experts = inputs(dtype)
    if name == "grouped" and dtype == torch.float64:
        with pytest.raises(ValueError, match=r'^experts: "grouped" needs fp32, bf16 .* got torch.float64, 16 and 8'):
            IMPLEMENTATIONS[name](leaves[0], experts, *leaves[1:], limit)
        return
    ours = IMPLEMENTATIONS[name](leaves[0], experts, *leaves[1:], limit)
    assert ours.dtype == leaves[1].dtype
    gradients = torch.autograd.grad(ours, leaves, incoming().to(ours.dtype))
    theirs, their_gradients = by_hand(leaves, experts, limit)
    assert float((ours.detach() - theirs).norm() / theirs.norm()) < bound
    for leaf, mine, exact, label in zip(leaves, gradients, their_gradients, NAMES, strict=True):
        assert mine.dtype == leaf.dtype, label
        assert float((mine - exact).norm() / exact.norm()) < bound, label
    for gradient in gradients[2:]:
        assert [index for index in range(EXPERTS) if not gradient[index].any()] == list(EMPTY)
    assert not ours[4].any()
    assert not gradients[0][4].any()


@pytest.mark.parametrize("name", ["loop", "grouped"])
def test_in_bf16_all_clamp_alike(name: str) -> None:
    leaves, experts = inputs(torch.bfloat16)
    results = []
    for products in (IMPLEMENTATIONS[name], IMPLEMENTATIONS["dense"]):
        out = products(leaves[0], experts, *leaves[1:], LIMIT)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, incoming())])
    for mine, reference in zip(*results, strict=True):
        assert float((mine.double() - reference.double()).norm() / reference.double().norm()) < 1e-2


class Watch(TorchDispatchMode):
    """What ran, and the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.made.append((func._schema.name, tuple(tensor.shape)))
        return out

    def count(self, name: str) -> int:
        return sum(made == name for made, _ in self.made)


def test_the_loop_visits_non_empty_experts_only_and_writes_each_gradient_once() -> None:
    leaves, experts = inputs()
    with Watch() as watch:
        IMPLEMENTATIONS["loop"](leaves[0], experts, *leaves[1:], LIMIT).sum().backward()
    visited = EXPERTS - len(EMPTY)
    assert watch.count("aten::mm") == (3 + 5) * visited
    assert watch.count("aten::addmm_") == visited
    # Beside views and the three gradients themselves, nothing is as large as a stack of matrices.
    large = [name for name, shape in watch.made if shape == (EXPERTS, WIDTH, HIDDEN)]
    assert large.count("aten::empty_like") == 2
    assert set(large) <= {"aten::empty_like", "aten::detach"}


def test_grouped_products_run_three_times_forward() -> None:
    leaves, experts = inputs()
    with Watch() as watch:
        out = IMPLEMENTATIONS["grouped"](leaves[0], experts, *leaves[1:], LIMIT)
    assert watch.count("aten::_grouped_mm") == 3
    assert watch.count("aten::mm") == 0
    assert watch.count("aten::_local_scalar_dense") == 0, "nothing is asked of the device"
    assert out.requires_grad


@pytest.mark.parametrize("frozen", range(5), ids=NAMES)
def test_gradients_that_nobody_needs_are_not_made(frozen: int) -> None:
    leaves, experts = inputs()
    expected = by_hand(leaves, experts, LIMIT)[1]
    leaves[frozen].requires_grad_(False)
    with Watch() as watch:
        IMPLEMENTATIONS["loop"](leaves[0], experts, *leaves[1:], LIMIT).backward(incoming())
    assert leaves[frozen].grad is None
    for index, leaf in enumerate(leaves):
        if index != frozen:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad.double(), expected[index], atol=1e-5, rtol=1e-5)
    visited = EXPERTS - len(EMPTY)
    fewer = {"x": 1, "weights": 0, "w1": 1, "w2": 1, "w3": 1}[NAMES[frozen]]
    assert watch.count("aten::mm") == (8 - fewer) * visited


@pytest.mark.parametrize("name", ["loop", "grouped"])
def test_what_is_kept_for_backward(name: str) -> None:
    leaves, experts = inputs(torch.bfloat16)
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.is_floating_point():
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        IMPLEMENTATIONS[name](leaves[0], experts, *leaves[1:], LIMIT)
    pairs = int((experts >= 0).sum())
    if name == "loop":
        assert sorted(tuple(tensor.shape) for tensor in kept) == [(pairs, 1), (pairs, WIDTH), (pairs, WIDTH)]
        assert [tensor.dtype for tensor in kept].count(torch.bfloat16) == 2
    else:
        wide = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.shape[-1] > 1]
        assert [tuple(tensor.shape) for tensor in wide] == [(TOKENS * TOPK, WIDTH)]


def test_recomputation_changes_no_bit() -> None:
    leaves, experts = inputs()
    products = IMPLEMENTATIONS["loop"]
    first = torch.autograd.grad(products(leaves[0], experts, *leaves[1:], LIMIT), leaves, incoming())
    again = checkpoint(products, leaves[0], experts, *leaves[1:], LIMIT, use_reentrant=False)
    for one, other in zip(first, torch.autograd.grad(again, leaves, incoming()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_tokens_at_all(name: str) -> None:
    leaves, experts = inputs()
    empty = [leaves[0][:0], leaves[1][:0]]
    out = IMPLEMENTATIONS[name](empty[0], experts[:0], empty[1], *leaves[2:], LIMIT)
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    for leaf in leaves[2:]:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_auto_takes_what_the_device_has() -> None:
    cpu = torch.empty(1, HIDDEN)
    assert expert_products("auto", cpu, WIDTH) is IMPLEMENTATIONS["loop"]
    assert expert_products("grouped", cpu, WIDTH) is IMPLEMENTATIONS["grouped"]


def test_grouped_products_name_sizes_that_they_do_not_take() -> None:
    leaves, experts = inputs()
    narrow = [leaves[2][:, :7], leaves[3][:, :, :7], leaves[4][:, :7]]
    with pytest.raises(ValueError, match=r"multiples of 16 bytes, got torch.float32, 16 and 7"):
        IMPLEMENTATIONS["grouped"](leaves[0], experts, leaves[1], *narrow, LIMIT)


@pytest.mark.parametrize("implementation", ["loop", "grouped", "dense"])
def test_autocast_computes_products_in_bf16_and_sums_in_fp32(implementation: str, tiny_config: Any) -> None:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS}
    config: DeepseekV41TextConfig = tiny_config(**sizes, swiglu_limit=LIMIT).text_config
    module = Experts(config, BackendConfig(experts=implementation))  # type: ignore[arg-type]
    leaves, experts = inputs()
    with torch.no_grad():
        for name, value in zip(("w1", "w2", "w3"), leaves[2:], strict=True):
            getattr(module, name).copy_(value)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(leaves[0], experts, leaves[1])
    assert out.dtype == torch.float32
    narrow = [leaf.detach().bfloat16() if index != 1 else leaf for index, leaf in enumerate(leaves)]
    assert torch.equal(out, IMPLEMENTATIONS[implementation](narrow[0], experts, *narrow[1:], LIMIT))
    out.backward(incoming())
    exact = by_hand(leaves, experts, LIMIT)[1]
    for name, reference in zip(("w1", "w2", "w3"), exact[2:], strict=True):
        gradient = getattr(module, name).grad
        assert gradient.dtype == torch.float32
        assert float((gradient - reference).norm() / reference.norm()) < 2e-2
    assert leaves[0].grad is not None
    assert float((leaves[0].grad - exact[0]).norm() / exact[0].norm()) < 2e-2


def test_swiglu_keeps_its_inputs_alone_and_has_the_gradient_of_autograd() -> None:
    generator = torch.Generator().manual_seed(8)
    gate, up = (torch.randn(50, 7, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    with torch.no_grad():
        gate[0, 0], up[0, 1], up[0, 2] = LIMIT, LIMIT, -LIMIT  # the bounds themselves pass
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours = swiglu(gate, up, LIMIT)
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]
    theirs = F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    assert torch.equal(ours, theirs)
    weights = torch.arange(350.0, dtype=torch.float64).view(50, 7).cos()
    for mine, exact in zip(
        torch.autograd.grad(ours, (gate, up), weights), torch.autograd.grad(theirs, (gate, up), weights), strict=True
    ):
        torch.testing.assert_close(mine, exact, atol=1e-14, rtol=1e-13)
