"""Sparse attention against the dense reference, in every branch; and nothing of queries times keys is ever made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.attention import AttentionCore
from dsv41.ops import sparse_attention
from dsv41.ops.selection import stable_topk


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison; rows of a batch have different numbers of live tokens."""

    batch: int
    length: int
    heads: int
    width: int
    window: int
    topk: int
    ratio: int

    def inputs(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Tensor]:
        """Queries, raw and compressed keys; the selection; live tokens."""
        generator = torch.Generator().manual_seed(self.length)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        q = random(self.batch, self.length, self.heads, self.width)
        tensors = [q, random(self.batch, self.length, self.width)]
        live = torch.ones(self.batch, self.length, dtype=torch.bool)
        live[0, self.length - self.length // 4 :] = False
        if not self.ratio:
            return tensors, None, live
        positions = self.length // self.ratio
        tensors.append(random(self.batch, positions, self.width))
        scores = torch.rand(self.batch, self.length, positions, generator=generator)
        ended = (torch.arange(self.length) + 1) // self.ratio
        scores = scores.masked_fill(torch.arange(positions) >= ended.unsqueeze(-1), float("-inf"))
        return tensors, stable_topk(scores, self.topk), live


CASES = {
    "ratio 2": Case(2, 90, 3, 8, window=5, topk=4, ratio=2),
    "ratio 1": Case(1, 150, 2, 8, window=7, topk=6, ratio=1),
    "window alone": Case(2, 53, 2, 8, window=40, topk=0, ratio=0),
    "window of one": Case(2, 40, 2, 4, window=1, topk=3, ratio=2),
    "top-k beyond the row": Case(2, 70, 2, 8, window=16, topk=100, ratio=1),
    "shorter than a block": Case(2, 9, 2, 8, window=4, topk=2, ratio=2),
    "shorter than a group": Case(2, 1, 2, 8, window=4, topk=2, ratio=2),
    "a whole number of blocks": Case(3, 64, 2, 8, window=16, topk=5, ratio=1),
}


def run(implementation: str, case: Case, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Output and all gradients of a loss that tells positions apart."""
    tensors, selection, live = case.inputs(dtype)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    core: AttentionCore = AttentionCore(case.heads, case.window, case.ratio, implementation)
    core.to(torch.float64 if dtype == torch.float64 else torch.float32)
    core.attn_sink.data.copy_(torch.linspace(-1, 2, case.heads))
    out, _ = core(leaves[0], leaves[1], leaves[2] if case.ratio else None, selection, live)
    weights = torch.arange(1, out.numel() + 1, dtype=torch.float64).view(out.shape).sin().to(out.dtype)
    (out * weights).sum().backward()
    assert core.attn_sink.grad is not None
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None] + [core.attn_sink.grad]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("alpha", [0, 2, 1000], ids=["gathered", "by cost", "behind a mask"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=str
)
def test_values_and_gradients_equal_the_dense_reference(
    case: Case, alpha: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "ALPHA", alpha)
    monkeypatch.setattr(sparse_attention, "GATHER_BYTES", 1)  # chunks of one block
    ours, theirs = run("sparse", case, dtype), run("eager", case, dtype)
    assert ours[0].dtype == dtype
    assert distance(ours[0], theirs[0]) <= bound
    assert len(ours[1]) == len(theirs[1]) == (4 if case.ratio else 3)
    for mine, reference in zip(ours[1], theirs[1], strict=True):
        assert mine.dtype == reference.dtype
        assert distance(mine, reference) <= bound
    live = case.inputs(dtype)[2]
    assert not ours[0][~live].any(), "padding gets zeros"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ratio])
@pytest.mark.parametrize("alpha", [0, 2, 1000], ids=["gathered", "by cost", "behind a mask"])
@pytest.mark.parametrize("implementation", ["sparse", "eager", "sdpa"])
def test_the_mass_of_the_selection_equals_a_loop_over_its_softmax(
    name: str, alpha: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "ALPHA", alpha)
    monkeypatch.setattr(sparse_attention, "GATHER_BYTES", 1)
    case = CASES[name]
    (q, kv, compressed), selection, live = case.inputs(torch.float64)
    assert selection is not None
    core = AttentionCore(case.heads, case.window, case.ratio, implementation).double()
    core.attn_sink.data.copy_(torch.linspace(-1, 2, case.heads))
    out, mass = core(q.requires_grad_(), kv, compressed, selection, live, with_mass=True)
    assert mass is not None
    assert not mass.requires_grad
    assert torch.equal(out, core(q, kv, compressed, selection, live)[0])
    expected = torch.zeros(selection.shape, dtype=torch.float64)
    scale = case.width**-0.5
    for b, s in live.nonzero().tolist():
        chosen = [p for p in selection[b, s].tolist() if p >= 0]
        keys = torch.cat((kv[b, max(0, s - case.window + 1) : s + 1], compressed[b, chosen]))
        logits = torch.cat((q[b, s] @ keys.T * scale, core.attn_sink.unsqueeze(-1)), dim=-1)
        weights = logits.softmax(-1)[:, len(keys) - len(chosen) : -1].sum(0)
        expected[b, s, : len(chosen)] = weights.detach()
    torch.testing.assert_close(mass, expected, atol=1e-13, rtol=1e-12)


def test_both_branches_run_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ratio 1"]
    tensors, selection, _ = case.inputs(torch.float32)
    chunks = list(sparse_attention._chunks(tensors[0], tensors[2], selection, case.ratio))
    assert [chunk.dense for chunk in chunks] == [chunk.visible <= 2 * case.topk for chunk in chunks]
    monkeypatch.setattr(sparse_attention, "GATHER_BYTES", 1)
    chunks = list(sparse_attention._chunks(tensors[0], tensors[2], selection, case.ratio))
    assert len(chunks) == -(-case.length // sparse_attention.BLOCK)
    assert [chunk.visible for chunk in chunks] == [chunk.stop for chunk in chunks]


@pytest.mark.parametrize(("implementation", "square"), [("sparse", False), ("eager", True)])
def test_nothing_grows_with_the_square_of_the_length(
    implementation: str, square: bool, largest_tensor: Callable[[], Any]
) -> None:
    sizes = []
    for length in (512, 1024):
        case = Case(1, length, 2, 8, window=8, topk=8, ratio=1)
        tensors, selection, live = case.inputs(torch.float32)
        core = AttentionCore(case.heads, case.window, case.ratio, implementation)
        q, kv, compressed = (tensor.requires_grad_() for tensor in tensors)
        with largest_tensor() as largest:
            core(q, kv, compressed, selection, live)[0].sum().backward()
        sizes.append(largest.elements)
    assert (sizes[1] > 3 * sizes[0]) == square, sizes
    assert (sizes[1] >= 1024 * 1024) == square, sizes


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("implementation", ["sparse", "eager", "sdpa"])
def test_a_window_beyond_the_row_costs_what_the_row_costs(
    implementation: str, ratio: int, largest_tensor: Callable[[], Any]
) -> None:
    """Counted forward and backward; the numbers are those of a window as long as the row, bit by bit."""
    length, topk = 24, 3 if ratio else 0
    results, sizes = [], []
    for window in (length, length + 1, 5000, 10**6, 2**62):
        with largest_tensor() as largest:
            results.append(run(implementation, Case(2, length, 2, 8, window, topk, ratio), torch.float32))
        sizes.append(largest.elements)
    assert len(set(sizes)) == 1, sizes
    for out, gradients in results[1:]:
        assert torch.equal(out, results[0][0])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, results[0][1], strict=True))


def test_a_second_backward_is_refused() -> None:
    tensors, selection, live = CASES["ratio 2"].inputs(torch.float32)
    core = AttentionCore(3, 5, 2, "sparse")
    q = tensors[0].requires_grad_()
    (gradient,) = torch.autograd.grad(core(q, *tensors[1:], selection, live)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("window", [1, 2, 3, 17, 18, 19, 34])
def test_a_window_of_any_size_sees_no_key_before_the_row(window: int) -> None:
    """Also where a single position in front of the row falls into a block of queries."""
    generator = torch.Generator().manual_seed(window)
    q = torch.randn(2, 37, 2, 8, generator=generator, dtype=torch.float64)
    kv = torch.randn(2, 37, 8, generator=generator, dtype=torch.float64)
    sink, live = torch.tensor([0.3, -0.7], dtype=torch.float64), torch.ones(2, 37, dtype=torch.bool)
    cores = (sparse_attention.IMPLEMENTATIONS[name] for name in ("sparse", "eager"))
    ours, expected = (core(q, kv, None, sink, None, live, window, 0)[0] for core in cores)
    torch.testing.assert_close(ours, expected, atol=1e-13, rtol=1e-12)
