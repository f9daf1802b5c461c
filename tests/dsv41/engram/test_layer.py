"""The Engram memory: lookup, gate and module against explicit float64 loops; the compiled gate against the eager one.

The compile switch belongs to the process. Tests that touch it run in a process of their own or put it back, so that
all others stay eager.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import dsv41
from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.engram import DeepseekV41Engram, compile_engram_gate
from dsv41.engram import layer as engram_module
from dsv41.engram.table import EngramTable
from dsv41.initialization import NamedDraws
from dsv41.ops import engram_gate
from dsv41.ops.compiled import CompiledCore

EPS = 1e-20
# The plain function, bound before any test swaps what the module calls.
gate_core = engram_gate.gate_memory


def gate_inputs(
    dtype: torch.dtype = torch.float64, shape: tuple[int, int, int, int] = (2, 5, 3, 8), seed: int = 0
) -> dict[str, Tensor]:
    """Random gate inputs whose norm weights differ between streams and channels."""
    batch, length, streams, hidden = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden_states": draw(batch, length, streams, hidden) * 2,
        "key": draw(batch, length, streams * hidden) * 3,
        "value": draw(batch, length, hidden),
        "q_weight": 1 + draw(streams, hidden) / 2,
        "k_weight": 1 + draw(streams, hidden) / 2,
    }


def looped_gate(
    hidden_states: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = EPS,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Updated streams, and the gates [B, S, C], by Python floats over one token and stream at a time."""
    batch, length, streams, hidden = hidden_states.shape
    out = hidden_states.double().clone()
    gates = torch.zeros(batch, length, streams, dtype=torch.float64)
    for b in range(batch):
        for s in range(length):
            if mask is not None and not bool(mask[b, s]):
                continue
            for c in range(streams):
                h = hidden_states[b, s, c].tolist()
                k = key[b, s, c * hidden : (c + 1) * hidden].tolist()
                mean_h = math.fsum(x * x for x in h) / hidden
                mean_k = math.fsum(x * x for x in k) / hidden
                normed_h = [x / math.sqrt(mean_h + eps) * w for x, w in zip(h, q_weight[c].tolist(), strict=True)]
                normed_k = [x / math.sqrt(mean_k + eps) * w for x, w in zip(k, k_weight[c].tolist(), strict=True)]
                dot = math.fsum(x * y for x, y in zip(normed_h, normed_k, strict=True)) / math.sqrt(hidden)
                root = math.sqrt(max(abs(dot), 1e-6)) * ((dot > 0) - (dot < 0))
                gates[b, s, c] = 1 / (1 + math.exp(-root))
                for i, v in enumerate(value[b, s].tolist()):
                    out[b, s, c, i] = h[i] + float(gates[b, s, c]) * v
    return out, gates


def assert_rounded_once(ours: Tensor, exact: Tensor) -> None:
    """`ours` is the nearest bf16 of `exact`: half a unit of 8 bits, and all but the near ties of fp32 exactly.

    Arithmetic in bf16 misses the nearest value on most elements.
    """
    assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.01 + 1e-6).all()
    assert float((ours == exact.bfloat16()).double().mean()) > 0.99


# ---------------------------------------------------------------- table


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lookup_is_plain_indexing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = EngramTable(rows=13, width=5, std=0.5)
    ids = torch.randint(13, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = table(ids)
    assert rows.shape == (*shape, 5)
    for row, index in zip(rows.reshape(-1, 5), ids.flatten().tolist(), strict=True):
        assert torch.equal(row, table.weight[index])


def test_lookup_sums_gradients_per_row_and_leaves_others_zero() -> None:
    table = EngramTable(rows=6, width=2, std=1.0)
    ids = torch.tensor([[5, 0, 5], [2, 5, 0]])
    upstream = torch.arange(12.0).view(2, 3, 2)
    table(ids).backward(upstream)
    expected = [[0.0, 0.0] for _ in range(6)]
    for row, gradient in zip(ids.flatten().tolist(), upstream.view(-1, 2).tolist(), strict=True):
        expected[row] = [a + b for a, b in zip(expected[row], gradient, strict=True)]
    assert table.weight.grad is not None
    assert table.weight.grad.tolist() == expected
    assert expected[1] == [0.0, 0.0] != expected[5]


def both_tables(rows: int, width: int, dtype: torch.dtype) -> tuple[EngramTable, EngramTable]:
    """Equal tables with a row-sparse and with a dense gradient."""
    sparse, dense = (EngramTable(rows, width, std=0.5, sparse_gradient=flag).to(dtype) for flag in (True, False))
    assert torch.equal(sparse.weight, dense.weight)
    return sparse, dense


@pytest.mark.parametrize("shape", [(1,), (40,), (2, 3, 8), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_the_row_sparse_gradient_is_the_dense_one(
    shape: tuple[int, ...], dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    sparse, dense = both_tables(13, 5, dtype)
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(13, 5, dtype=dtype)
    for passes in (1, 2):
        ids = torch.randint(3, 13, shape, generator=generator).to(id_dtype)
        # Integers, so that repeated rows add up to the same in any order and in every dtype.
        upstream = torch.randint(-4, 5, (*shape, 5), generator=generator).to(dtype)
        for table in (sparse, dense):
            out = table(ids)
            assert out.shape == upstream.shape
            assert torch.equal(out, table.weight[ids.long()])
            out.backward(upstream)
        total += (torch.eye(13)[ids.flatten().long()].T @ upstream.reshape(-1, 5).float()).to(dtype)
        gradient = sparse.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert (gradient.shape, gradient.dtype) == (dense.weight.shape, dtype)
        assert gradient._nnz() <= passes * ids.numel()
        assert torch.equal(gradient.to_dense(), total)
        assert torch.equal(dense.weight.grad, total)  # type: ignore[arg-type]
    assert (ids.numel() == 0) == (not total.any())


def test_a_row_sparse_gradient_holds_the_rows_read_and_no_others() -> None:
    table = EngramTable(rows=13, width=2, std=0.5, sparse_gradient=True)
    # A broadcast gradient, as a sum has it, must become memory that can be scaled in place.
    table(torch.tensor([[7, 0], [7, 12]])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient._indices().tolist() == [[7, 0, 7, 12]]
    gradient.mul_(0.5)
    merged = gradient.coalesce()
    assert merged.indices().tolist() == [[0, 7, 12]]
    assert merged.values().tolist() == [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]
    # What comes down to the rows is not theirs to scale.
    table.weight.grad, upstream = None, torch.ones(3, 2)
    table(torch.tensor([1, 2, 3])).backward(upstream)
    assert table.weight.grad is not None
    table.weight.grad.mul_(0.5)
    assert torch.equal(upstream, torch.ones(3, 2))


def largest_allocation(run: Callable[[], object]) -> int:
    """Bytes of the largest block that torch's allocator gives during `run`, also inside operations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_nothing_of_the_tables_size_is_made_for_a_row_sparse_gradient() -> None:
    ids = torch.tensor([[3, 900, 3], [41, 0, 7]])
    largest = {}
    for table in both_tables(1000, 5, torch.float32):

        def step(table: EngramTable = table) -> None:
            for _ in range(2):  # the second is added to the first
                table(ids).square().sum().backward()
            torch._foreach_mul_([table.weight.grad], 0.5)

        largest[table.sparse_gradient] = largest_allocation(step)
    assert largest[False] >= 1000 * 5 * 4
    # The rows of two passes may meet in one tensor.
    assert 6 * 5 * 4 <= largest[True] <= 2 * 6 * 5 * 4


def test_a_row_sparse_gradient_needs_a_weight_that_wants_one_and_survives_recomputation() -> None:
    table = EngramTable(rows=13, width=5, std=0.5, sparse_gradient=True)
    ids = torch.tensor([3, 3, 0])
    with torch.no_grad():
        assert not table(ids).requires_grad
    checkpoint(table, ids, use_reentrant=False).square().sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    expected = torch.zeros(13, 5).index_add(0, ids, 2 * table.weight[ids]).detach()
    torch.testing.assert_close(table.weight.grad.to_dense(), expected)
    table.weight.requires_grad_(False)
    assert not table(ids).requires_grad
    assert torch.equal(table(ids), table.weight[ids])


def test_a_row_sparse_gradient_of_a_dtensor_on_one_rank() -> None:
    """As the strategy has it on one device: a DTensor that one rank holds whole, and no exchange."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        sparse, dense = both_tables(13, 5, torch.float64)
        sparse.shard(init_device_mesh("cpu", (1,)))
        assert isinstance(sparse.weight, DTensor)
        assert sparse.process_group is None
        ids = torch.tensor([[3, 3, 0], [12, 5, 3]])
        for table in (sparse, dense):
            table(ids).pow(3).sum().backward()
        gradient = sparse.weight.grad
        assert gradient is not None
        assert gradient.layout == torch.sparse_coo
        torch.testing.assert_close(gradient.to_dense(), dense.weight.grad)
    finally:
        dist.destroy_process_group()


def test_a_models_tables_are_row_sparse_on_request(golden_model: Any, golden: dict[str, Tensor]) -> None:
    gradients = []
    for sparse in (True, False):
        model = golden_model(backend=BackendConfig(sparse_table_gradient=sparse)).double()
        model(golden["input_ids"], golden["attention_mask"], labels=golden["labels"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tables = {name for name, gradient in gradients[0].items() if gradient is not None and gradient.is_sparse}
    assert tables == {"model.layers.1.engram.embed.weight", "model.layers.3.engram.embed.weight"}
    for name, gradient in gradients[1].items():
        other = gradients[0][name]
        if name in tables:
            torch.testing.assert_close(other.to_dense(), gradient, atol=1e-15, rtol=1e-12)
        else:
            assert other is gradient is None or torch.equal(other, gradient), name


def test_a_descent_step_along_a_row_sparse_gradient_is_the_dense_step() -> None:
    tables = both_tables(13, 5, torch.float32)
    ids = torch.tensor([3, 3, 0, 12])
    for table in tables:
        table(ids).pow(3).sum().backward()
        torch.optim.SGD(table.parameters(), lr=0.5).step()
    sparse, dense = tables
    torch.testing.assert_close(sparse.weight, dense.weight)
    assert (sparse.weight != EngramTable(13, 5, 0.5).weight).any(-1).nonzero().flatten().tolist() == [0, 3, 12]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("wrong", [-1, 13, 10_000])
def test_rows_outside_the_table_are_refused(strict: bool, wrong: int) -> None:
    table = EngramTable(rows=13, width=5, std=0.5, strict_validation=strict)
    with pytest.raises(ValueError, match=rf"^hash ids: ids must lie in 0\.\.12, got {wrong}$"):
        table(torch.tensor([[12, wrong, 0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_hash_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^hash ids: must be int32 or int64 ids in 0\.\.12"):
        EngramTable(rows=13, width=5, std=0.5)(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("first", "rows"), [(0, 4096), (1, 4096), (4095, 2), (4096, 5), (5000, 4000), (8999, 1), (3, 0)]
)
def test_a_part_of_the_table_is_drawn_like_the_whole(first: int, rows: int) -> None:
    whole, part = torch.zeros(9000, 3), torch.zeros(rows, 3)
    NamedDraws("model.layers.1.engram.embed", seed=7).normal_rows_(whole, "weight", 0.5)
    NamedDraws("model.layers.1.engram.embed", seed=7).normal_rows_(part, "weight", 0.5, first_row=first)
    assert torch.equal(part, whole[first : first + rows])
    assert len(whole.unique(dim=0)) == 9000, "blocks do not repeat each other"
    assert float(whole.std()) == pytest.approx(0.5, rel=0.02)


# ---------------------------------------------------------------- gate


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("eps", [EPS, 0.5])
def test_gate_equals_a_float64_loop(masked: bool, eps: float) -> None:
    inputs = gate_inputs()
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
    out, gates = looped_gate(**inputs, eps=eps, mask=mask)
    live = gates[gates > 0]
    assert live.min() < 0.4, "negative products"
    assert live.max() > 0.6, "positive products"
    torch.testing.assert_close(gate_core(**inputs, eps=eps, token_mask=mask), out, atol=1e-13, rtol=1e-12)
    narrow = {name: tensor.float() for name, tensor in inputs.items()}
    ours = gate_core(**narrow, eps=eps, token_mask=mask)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), out, atol=5e-6, rtol=0)


def test_every_stream_has_weights_and_keys_of_its_own() -> None:
    inputs = gate_inputs()
    out = gate_core(**inputs, eps=EPS, token_mask=None)
    for name, change in (
        ("q_weight", (1, slice(None))),
        ("k_weight", (1, slice(None))),
        ("key", (slice(None), slice(None), slice(8, 16))),
    ):
        other = {key: tensor.clone() for key, tensor in inputs.items()}
        other[name][change] *= torch.linspace(-1, 2, 8, dtype=torch.float64)
        moved = (gate_core(**other, eps=EPS, token_mask=None) != out).any(-1).flatten(0, 1)
        assert moved[:, 1].all(), name
        assert not moved[:, [0, 2]].any(), name


@pytest.mark.parametrize(
    ("dot", "root"),
    [(0.0, 0.0), (1e-9, 1e-3), (-1e-9, -1e-3), (9e-7, 1e-3), (-4e-6, -2e-3), (0.09, 0.3), (-1.44, -1.2), (1.96, 1.4)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_of_a_given_product_has_its_closed_form(dot: float, root: float, dtype: torch.dtype) -> None:
    # Four channels of ones have rstd 1; a key [2b, 2a, 0, 0] has mean square a^2 + b^2 = 1; the weights on the key are
    # chosen so that the product is exactly `dot`, and for 0 by orthogonal vectors rather than by a zero weight.
    hidden = torch.ones(1, 1, 1, 4, dtype=dtype)
    key = torch.tensor([[[2.0, 0.0, 0.0, 0.0]]] if dot else [[[1.0, -1.0, 1.0, -1.0]]], dtype=dtype)
    weight = torch.full((1, 4), dot if dot else 1.0, dtype=dtype)
    value = torch.tensor([[[1.0, -2.0, 3.0, 0.5]]], dtype=dtype)
    out = gate_core(hidden, key, value, torch.ones(1, 4, dtype=dtype), weight, EPS, None)
    gate = 1 / (1 + math.exp(-root))
    expected = 1 + gate * torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-7
    torch.testing.assert_close(out.flatten().double(), expected, atol=tolerance, rtol=tolerance)


def test_zero_streams_and_zero_keys_gate_at_one_half_with_finite_gradients() -> None:
    inputs = gate_inputs(torch.float32)
    inputs["hidden_states"][0, 0] = 0
    inputs["key"][0, 1] = 0
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    out = gate_core(**leaves, eps=EPS, token_mask=None)
    half = (inputs["value"] / 2).unsqueeze(-2).expand(-1, -1, 3, -1)
    torch.testing.assert_close(out[0, 0], half[0, 0], atol=0, rtol=0)
    torch.testing.assert_close(out[0, 1], inputs["hidden_states"][0, 1] + half[0, 1], atol=1e-6, rtol=0)
    out.square().sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masked_tokens_keep_every_bit_and_get_no_gradient_from_the_memory(dtype: torch.dtype) -> None:
    inputs = gate_inputs(dtype)
    inputs["value"].requires_grad_()
    mask = torch.tensor([[True, False, True, False, False], [False, True, True, True, False]])
    out = gate_core(**inputs, eps=EPS, token_mask=mask)
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    same = (out.detach().view(integers) == inputs["hidden_states"].view(integers)).flatten(2)
    assert same[~mask].all()
    assert not same[mask].all(-1).any()
    out.sum().backward()
    assert inputs["value"].grad is not None
    assert (inputs["value"].grad != 0).any(-1).equal(mask)


def test_gradients_equal_finite_differences() -> None:
    inputs = gate_inputs(shape=(1, 3, 2, 4))
    mask = torch.tensor([[True, False, True]])
    leaves = tuple(tensor.requires_grad_() for tensor in inputs.values())
    _, gates = looped_gate(**{name: tensor.detach() for name, tensor in inputs.items()})
    assert ((gates - 0.5).abs() > 0.02).all(), "no product near 0, where the gate jumps"
    assert torch.autograd.gradcheck(lambda *args: gate_core(*args, EPS, mask), leaves)


def test_below_the_floor_the_product_gets_no_gradient() -> None:
    hidden = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    key = torch.tensor([[[2.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    for dot, moves in ((9e-7, False), (1.1e-6, True)):
        weight = torch.full((1, 4), dot, dtype=torch.float64, requires_grad=True)
        gate_core(hidden, key, torch.ones(1, 1, 4, dtype=torch.float64), torch.ones_like(weight), weight, EPS, None)[
            0, 0, 0, 0
        ].backward()
        assert weight.grad is not None
        assert bool(weight.grad.any()) is moves


def test_bf16_streams_are_computed_in_fp32_and_rounded_once() -> None:
    inputs = gate_inputs(torch.bfloat16, shape=(2, 8, 3, 64))
    out = gate_core(**inputs, eps=EPS, token_mask=None)
    assert out.dtype == torch.bfloat16
    exact, _ = looped_gate(**inputs)
    assert_rounded_once(out, exact)
    assert torch.equal(out, gate_core(**{k: t.float() for k, t in inputs.items()}, eps=EPS, token_mask=None).bfloat16())


# ---------------------------------------------------------------- module


def make_module(config: DeepseekV41Config, layer: int, backend: BackendConfig | None = None) -> DeepseekV41Engram:
    torch.manual_seed(layer)
    module = DeepseekV41Engram(config.text_config, layer, backend or BackendConfig())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4 + (1 if name.endswith("k_weight") else 0.2))
    return module


@pytest.mark.parametrize("layer", [1, 3])
def test_module_equals_a_float64_loop(tiny_config: Callable[..., DeepseekV41Config], layer: int) -> None:
    config = tiny_config()
    module = make_module(config, layer)
    rows = {1: 408, 3: 484}[layer]
    generator = torch.Generator().manual_seed(layer)
    ids = torch.randint(rows, (2, 3, 4), generator=generator)
    hidden = torch.randn(2, 3, 4, 64, generator=generator)
    mask = torch.tensor([[True, True, False], [True, False, True]])
    table, wkv = module.embed.weight.detach().double(), module.wkv.weight.detach().double()
    assert table.shape == (rows, 16)
    assert wkv.shape == (4 * 64 + 64, 4 * 16)
    projected = torch.zeros(2, 3, 320, dtype=torch.float64)
    for b in range(2):
        for s in range(3):
            read = [float(x) for column in range(4) for x in table[int(ids[b, s, column])]]
            for o in range(320):
                projected[b, s, o] = math.fsum(w * x for w, x in zip(wkv[o].tolist(), read, strict=True))
    weights = (module.q_weight.detach(), module.k_weight.detach())
    expected, gates = looped_gate(hidden, projected[..., :256], projected[..., 256:], *weights, mask=mask)
    assert float(gates[mask].std()) > 0.05
    torch.testing.assert_close(module(hidden, ids, mask).double(), expected, atol=1e-5, rtol=0)
    exact = module.double()(hidden.double(), ids, mask)
    torch.testing.assert_close(exact, expected, atol=1e-12, rtol=0)


def test_module_gradients_reach_every_parameter_and_equal_finite_differences(
    tiny_config: Callable[..., DeepseekV41Config],
) -> None:
    module = make_module(tiny_config(hidden_size=8, engram_head_dim=2, hc_mult=2), 1).double()
    ids = torch.tensor([[[0, 100, 200, 400], [3, 100, 205, 407]]])
    hidden = torch.randn(1, 2, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module(hidden, ids).sin().sum().backward()
    leaves = {"hidden": hidden} | dict(module.named_parameters())
    assert len(leaves) == 5
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        touched = leaf.grad.nonzero()
        assert len(touched) > 0, name
        for index in (tuple(touched[0].tolist()), tuple(touched[-1].tolist())):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    leaf[index] += step
                    values.append(float(module(hidden, ids).sin().sum()))
                    leaf[index] -= step
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(leaf.grad[index]), rel=1e-5, abs=1e-8), name
    assert module.embed.weight.grad is not None
    read = module.embed.weight.grad.any(-1).nonzero().flatten().tolist()
    assert read == sorted(set(ids.flatten().tolist()))


def test_bf16_module_returns_bf16_and_gates_in_fp32(tiny_config: Callable[..., DeepseekV41Config]) -> None:
    module = make_module(tiny_config(), 1).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(408, (2, 6, 4), generator=generator)
    hidden = torch.randn(2, 6, 4, 64, generator=generator).bfloat16()
    out = module(hidden, ids)
    assert out.dtype == torch.bfloat16
    key, value = module.wkv(module.embed(ids).flatten(-2)).split((256, 64), dim=-1)
    assert key.dtype == torch.bfloat16
    exact, _ = looped_gate(hidden, key, value, module.q_weight.detach(), module.k_weight.detach())
    assert_rounded_once(out, exact)


# ---------------------------------------------------------------- compiled gate, in this process


@pytest.fixture
def counting_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """torch.compile with a quick backend that counts graphs; the process-wide switch is off before and after."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile

    def quick(function: Any, **options: Any) -> Any:
        assert options == {"dynamic": False}, "shapes are compiled one by one, and graph breaks are allowed"
        return compile_(function, backend=counter, **options)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", quick)
    monkeypatch.setitem(engram_gate.IMPLEMENTATIONS, "compiled", CompiledCore("Engram gate", gate_core))
    monkeypatch.setattr(engram_module, "_ENGRAM_GATE_COMPILED", False)
    yield counter
    torch._dynamo.reset()


def current_gate(inputs: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
    name = "compiled" if engram_module._ENGRAM_GATE_COMPILED else "eager"
    return engram_gate.IMPLEMENTATIONS[name](*inputs.values(), EPS, mask)  # type: ignore[arg-type]


def test_compiled_gate_makes_one_graph_per_shape(counting_compiler: CompileCounterWithBackend) -> None:
    compile_engram_gate()
    assert counting_compiler.frame_count == 0
    for length, graphs in ((3, 1), (4, 2), (3, 2), (4, 2)):
        inputs = gate_inputs(torch.float32, (2, length, 3, 8))
        torch.testing.assert_close(current_gate(inputs), gate_core(**inputs, eps=EPS, token_mask=None))
        assert counting_compiler.frame_count == graphs


def test_compiling_twice_is_harmless(counting_compiler: CompileCounterWithBackend) -> None:
    compile_engram_gate()
    inputs = gate_inputs(torch.float32)
    current_gate(inputs)
    compile_engram_gate()
    current_gate(inputs)
    assert counting_compiler.frame_count == 1


def test_more_shapes_than_the_recompile_limit_run_eager(counting_compiler: CompileCounterWithBackend) -> None:
    compile_engram_gate()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        for length in range(1, 5):
            inputs = gate_inputs(torch.float32, (1, length, 3, 8), seed=length)
            leaves = [tensor.requires_grad_() for tensor in inputs.values()]
            ours, theirs = current_gate(inputs), gate_core(**inputs, eps=EPS, token_mask=None)
            torch.testing.assert_close(ours, theirs)
            ours_grad = torch.autograd.grad(ours.sin().sum(), leaves)
            torch.testing.assert_close(ours_grad, torch.autograd.grad(theirs.sin().sum(), leaves))
    assert counting_compiler.frame_count == 2


# torch's tracer itself looks at `.grad` of inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_that_asks_for_it_runs_the_compiled_gate_and_equals_eager(
    counting_compiler: CompileCounterWithBackend, golden_model: Callable[..., Any], golden: dict[str, Tensor]
) -> None:
    # In float64: an fp32 rounding of another kernel can move a cache value or a selection further on.
    arguments = {name: golden[name] for name in ("input_ids", "attention_mask", "labels")}
    eager = golden_model(backend=BackendConfig(loss="full")).double()
    expected = eager(**arguments)
    expected.loss.backward()
    assert counting_compiler.frame_count == 0
    model = golden_model(backend=BackendConfig(loss="full", compile_engram=True)).double()
    out = model(**arguments)
    out.loss.backward()
    assert not engram_module._ENGRAM_GATE_COMPILED, "the model asks for itself alone"
    assert counting_compiler.frame_count == 1, "both Engram layers share one shape"
    live = golden["attention_mask"].bool()
    torch.testing.assert_close(out.logits[live], expected.logits[live], atol=1e-11, rtol=0)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-10, name


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no compiler\nlong story"), OSError("disk full"), ImportError("no triton"), RuntimeError()],
    ids=["RuntimeError", "OSError", "ImportError", "without text"],
)
def test_a_failing_compiler_warns_once_and_runs_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    attempts: list[int] = []

    def broken(function: Any, **_: Any) -> Any:
        def fail(*_: Any) -> Tensor:
            attempts.append(1)
            raise error

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setitem(engram_gate.IMPLEMENTATIONS, "compiled", CompiledCore("Engram gate", gate_core))
    monkeypatch.setattr(engram_module, "_ENGRAM_GATE_COMPILED", False)
    compile_engram_gate()
    inputs = gate_inputs(torch.float32)
    with caplog.at_level(logging.WARNING, logger="dsv41.engram"):
        for _ in range(3):
            assert torch.equal(current_gate(inputs), gate_core(**inputs, eps=EPS, token_mask=None))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(attempts) == 1
    message = warnings[0].getMessage()
    assert "running eager" in message
    assert str(error).split("\n")[0] in message
    assert "long story" not in message


# ---------------------------------------------------------------- compiled gate, in a process of its own

SCRIPT = """
import logging, sys
import torch
from torch._dynamo.utils import counters
from dsv41.engram import layer as engram
from dsv41.ops import engram_gate
from dsv41.ops.compiled import CompiledCore

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
generator = torch.Generator().manual_seed(0)
h = torch.randn(2, 5, 3, 8, generator=generator).requires_grad_()
key = torch.randn(2, 5, 24, generator=generator).requires_grad_()
value = torch.randn(2, 5, 8, generator=generator).requires_grad_()
q, k = ((1 + torch.randn(3, 8, generator=generator) / 2).requires_grad_() for _ in range(2))
leaves = (h, key, value, q, k)
mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
core = engram_gate.gate_memory

print("BROKEN")
with torch._inductor.config.patch({"cpp.cxx": (None, sys.argv[1] + "/no-such-compiler")}):
    for _ in range(2):
        out = engram_gate.IMPLEMENTATIONS["compiled"](*leaves, 1e-20, mask)
        assert torch.equal(out, core(*leaves, 1e-20, mask))
        assert torch.autograd.grad(out.sum(), h)[0].any()

print("WORKING")
torch._dynamo.reset()
counters.clear()
engram_gate.IMPLEMENTATIONS["compiled"] = CompiledCore("Engram gate", core)
compiled, eager = engram_gate.IMPLEMENTATIONS["compiled"](*leaves, 1e-20, mask), core(*leaves, 1e-20, mask)
torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-5)
for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (compiled, eager)), strict=True):
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
assert torch.equal(compiled[~mask], h[~mask])
assert counters["stats"]["unique_graphs"] == 1, counters
assert not counters["graph_break"], counters["graph_break"]
print("DONE")
"""


def test_inductor_gate_equals_eager_and_without_a_working_compiler_the_gate_warns_and_is_eager(tmp_path: Path) -> None:
    settings = {
        "PYTHONPATH": str(Path(dsv41.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    broken, _, working = done.stdout.partition("WORKING")
    assert broken.count("WARNING Engram gate: compilation failed, running eager instead") == 1
    assert "WARNING" not in working
    assert "INFO compiling the Engram gate" in working
    assert "INFO Engram gate compiled in" in working
    assert "DONE" in working
    assert list((tmp_path / "cache").rglob("*.so")), "native code was made"
