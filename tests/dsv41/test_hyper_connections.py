"""Single-pass mHC: coefficients, Sinkhorn, collapse and expand against hand-written loops, and the hand-off.

One part holds values and gradients of a site to its formulas in float64 and looks at what it makes and saves, another
at the compiled core, whose switch belongs to the process: tests that touch it run in a process of their own or put it
back. The last part looks at the model from outside: what each site reads and how streams move there is observed at the
inputs of norms and hyper-connections while one site's coefficients are replaced.
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
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import dsv41
from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState
from dsv41.hyper_connections import HyperConnection
from dsv41.inputs import check_inputs
from dsv41.ops import mixing
from dsv41.ops.compiled import CompiledCore
from dsv41.ops.mixing import collapse, expand, sinkhorn

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]

SITES = [(layer, part) for layer in range(6) for part in ("attn", "ffn")]
IDS = torch.tensor([[5, 300, 7, 7, 41, 450, 12, 99, 260, 3, 8, 77, 123]])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------ Sinkhorn


def sinkhorn_by_hand(logits: list[list[Any]], rounds: int, eps: float, exp: Callable[[Any], Any]) -> list[list[Any]]:
    """On Python floats, or on float64 scalars that carry a graph."""
    size = range(len(logits))
    x = []
    for row in logits:
        top = max(float(getattr(value, "data", value)) for value in row)
        powers = [exp(value - top) for value in row]
        x.append([power / sum(powers) + eps for power in powers])
    for step in range(rounds):
        if step:
            x = [[value / (sum(row) + eps) for value in row] for row in x]
        sums = [sum(x[i][o] for i in size) + eps for o in size]
        x = [[x[i][o] / sums[o] for o in size] for i in size]
    return x


def logits_of(size: int, spread: float, count: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.rand(count, size, size, generator=generator) * 2 - 1) * spread
    logits[0, 0, 1], logits[1, 2, 0] = spread, -spread
    return logits


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 0.05])
@pytest.mark.parametrize("spread", [2.0, 80.0])
@pytest.mark.parametrize("size", [3, 4])
def test_sinkhorn_equals_a_float64_loop(size: int, spread: float, eps: float, rounds: int) -> None:
    logits = logits_of(size, spread)
    ours = sinkhorn(logits, rounds, eps)
    expected = [sinkhorn_by_hand(matrix, rounds, eps, math.exp) for matrix in logits.double().tolist()]
    torch.testing.assert_close(ours.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-5, atol=1e-7)
    assert (ours > 0).all()


@pytest.mark.parametrize("spread", [2.0, 80.0])
@pytest.mark.parametrize("size", [3, 4])
def test_sinkhorn_gradients_are_finite_and_equal_float64_autograd(size: int, spread: float) -> None:
    logits = logits_of(size, spread, count=4).requires_grad_()
    incoming = random(4, size, size, seed=1)
    sinkhorn(logits, 20, 1e-6).backward(incoming)
    exact = logits.detach().double().requires_grad_()
    for matrix, weights in zip(exact, incoming.double(), strict=True):
        rows = [list(row) for row in matrix]
        mixed = sinkhorn_by_hand(rows, 20, 1e-6, torch.exp)
        torch.stack([torch.stack(row) for row in mixed]).backward(weights, retain_graph=True)
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.any()
    # Entries may cancel; the error is measured against the largest one of each matrix.
    error = (logits.grad.double() - exact.grad).abs().amax((1, 2))
    assert (error <= 1e-4 * exact.grad.abs().amax((1, 2)) + 1e-9).all()


@pytest.mark.parametrize("size", [3, 4])
def test_rows_and_columns_of_the_mixer_sum_to_one(size: int) -> None:
    logits = logits_of(size, 2.0)
    ours = sinkhorn(logits, 20, 1e-6)
    assert (ours.sum(-2) - 1).abs().max() < 1e-5
    assert (ours.sum(-1) - 1).abs().max() < 1e-4
    assert (ours - ours.mT).abs().max() > 0.05  # rows and columns are not the same thing here
    one_round = sinkhorn(logits, 1, 1e-6)
    assert (one_round.sum(-1) - 1).abs().max() > 0.05  # the iterations are needed


def test_sinkhorn_is_bit_equal_under_autocast() -> None:
    logits = logits_of(4, 80.0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = sinkhorn(logits, 20, 1e-6)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, sinkhorn(logits, 20, 1e-6))


def test_a_second_derivative_of_sinkhorn_is_refused() -> None:
    logits = logits_of(4, 2.0).requires_grad_()
    (gradient,) = torch.autograd.grad(sinkhorn(logits, 20, 1e-6).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


# ------------------------------------------------------------------ coefficients


def make_site(
    tiny_config: MakeConfig, streams: int, hidden: int = 6, backend: BackendConfig | None = None, **overrides: Any
) -> HyperConnection:
    config = tiny_config(hidden_size=hidden, hc_mult=streams, **overrides).text_config
    site = HyperConnection(config, backend or BackendConfig())
    with torch.no_grad():
        site.fn.copy_(random(*site.fn.shape, seed=2))
        site.base.copy_(random(*site.base.shape, seed=3))
        site.scale.copy_(torch.tensor([0.7, -1.3, 2.1]))  # one per part, or a swap goes unseen
    return site


def coefficients_by_hand(site: HyperConnection, token: Tensor, hc_eps: float, rms_eps: float, rounds: int) -> Any:
    flat = [value for stream in token.double().tolist() for value in stream]
    rms = math.sqrt(sum(value * value for value in flat) / len(flat) + rms_eps)
    scale, base = site.scale.tolist(), site.base.double().tolist()
    count = len(token)
    logits = []
    for index, row in enumerate(site.fn.double().tolist()):
        part = min(index // count, 2)
        mixed = sum(weight * value for weight, value in zip(row, flat, strict=True)) / rms
        logits.append(mixed * scale[part] + base[index])
    pre = [1 / (1 + math.exp(-value)) + hc_eps for value in logits[:count]]
    post = [2 / (1 + math.exp(-value)) for value in logits[count : 2 * count]]
    matrix = [logits[2 * count + count * i : 2 * count + count * (i + 1)] for i in range(count)]
    return pre, post, sinkhorn_by_hand(matrix, rounds, hc_eps, math.exp)


@pytest.mark.parametrize("streams", [3, 4])
@pytest.mark.parametrize(("hc_eps", "rms_eps"), [(1e-6, 1e-20), (0.03, 0.5)])
def test_coefficients_equal_a_float64_loop(
    tiny_config: MakeConfig, streams: int, hc_eps: float, rms_eps: float
) -> None:
    site = make_site(tiny_config, streams, hc_eps=hc_eps, rms_norm_eps=rms_eps, hc_sinkhorn_iters=7)
    x, carried = random(2, 3, streams, 6, seed=4) * 2, random(2, 3, streams, seed=30)
    read, *ours = site(x, carried)
    for row in range(2):
        for token in range(3):
            mix = carried[row, token].double() @ x[row, token].double()
            torch.testing.assert_close(read[row, token].double(), mix, rtol=2e-5, atol=1e-6)
            expected = coefficients_by_hand(site, x[row, token], hc_eps, rms_eps, 7)
            for mine, theirs in zip(ours, expected, strict=True):
                theirs = torch.tensor(theirs, dtype=torch.float64)
                torch.testing.assert_close(mine[row, token].detach().double(), theirs, rtol=2e-5, atol=1e-6)


def test_coefficients_of_bf16_streams_are_fp32(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 4)
    x, carried = random(2, 3, 4, 6, seed=5).bfloat16(), random(2, 3, 4, seed=30)
    (read, *ours), (exact_read, *exact) = site(x, carried), site(x.float(), carried)
    assert torch.equal(read, exact_read.bfloat16())
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


def test_coefficients_of_float64_streams_are_float64(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 3).double()
    x, carried = (random(*shape, seed=5, dtype=torch.float64) for shape in ((1, 2, 3, 6), (1, 2, 3)))
    assert {part.dtype for part in site(x, carried)} == {torch.float64}


def test_coefficients_are_bit_equal_under_autocast(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 4)
    x, carried = random(2, 3, 4, 6, seed=6), random(2, 3, 4, seed=30)
    with torch.autocast("cpu", torch.bfloat16):
        inside = site(x, carried)
    for ours, exact in zip(inside, site(x, carried), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, exact)


# ------------------------------------------------------------------ collapse and expand


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_collapse_and_expand_equal_a_loop(dtype: torch.dtype, atol: float) -> None:
    streams, y = random(2, 5, 3, 7, seed=7, dtype=dtype), random(2, 5, 7, seed=8, dtype=dtype)
    pre, post = random(2, 5, 3, seed=9, dtype=dtype), random(2, 5, 3, seed=10, dtype=dtype)
    comb = random(2, 5, 3, 3, seed=11, dtype=dtype)
    read, written = torch.zeros(2, 5, 7, dtype=torch.float64), torch.zeros(2, 5, 3, 7, dtype=torch.float64)
    for b in range(2):
        for s in range(5):
            for c in range(3):
                read[b, s] += float(pre[b, s, c]) * streams[b, s, c].double()
                written[b, s, c] += float(post[b, s, c]) * y[b, s].double()
                for i in range(3):
                    written[b, s, c] += float(comb[b, s, i, c]) * streams[b, s, i].double()
    torch.testing.assert_close(collapse(streams, pre).double(), read, atol=atol, rtol=0)
    torch.testing.assert_close(expand(y, streams, post, comb).double(), written, atol=atol, rtol=0)


def test_expand_moves_streams_along_a_permutation() -> None:
    # comb[i, o] = 1 sends stream i to place o: 0 -> 1 -> 2 -> 3 -> 0, whose inverse is a different matrix.
    comb = torch.zeros(1, 2, 4, 4)
    for i in range(4):
        comb[..., i, (i + 1) % 4] = 1
    streams, y = random(1, 2, 4, 5, seed=12), random(1, 2, 5, seed=13)
    moved = expand(y, streams, torch.zeros(1, 2, 4), comb)
    for i in range(4):
        assert torch.equal(moved[:, :, (i + 1) % 4], streams[:, :, i])
    post = torch.tensor([0.0, 2.0, 0.0, 0.0]).expand(1, 2, 4)
    written = expand(y, streams, post, comb)
    assert torch.equal(written[:, :, [0, 2, 3]], moved[:, :, [0, 2, 3]])
    torch.testing.assert_close(written[:, :, 1], streams[:, :, 0] + 2 * y)


def test_bf16_streams_are_mixed_in_fp32_and_cast_once() -> None:
    streams, y = random(2, 8, 4, 32, seed=14).bfloat16(), random(2, 8, 32, seed=15).bfloat16()
    pre, post, comb = random(2, 8, 4, seed=16), random(2, 8, 4, seed=17), random(2, 8, 4, 4, seed=18)
    read, written = collapse(streams, pre), expand(y, streams, post, comb)
    exact_read = torch.einsum("bsc,bsch->bsh", pre.double(), streams.double())
    exact = torch.einsum("bsio,bsih->bsoh", comb.double(), streams.double())
    exact = exact + torch.einsum("bso,bsh->bsoh", post.double(), y.double())
    for ours, theirs in ((read, exact_read), (written, exact)):
        assert ours.dtype == torch.bfloat16
        # Only values in the very middle of two bf16 numbers may fall to the other side.
        assert (ours != theirs.bfloat16()).double().mean() < 0.005


def test_mixing_is_bit_equal_under_autocast() -> None:
    streams, y = random(2, 5, 4, 7, seed=19), random(2, 5, 7, seed=20)
    pre, post, comb = random(2, 5, 4, seed=21), random(2, 5, 4, seed=22), random(2, 5, 4, 4, seed=23)
    with torch.autocast("cpu", torch.bfloat16):
        inside = collapse(streams, pre), expand(y, streams, post, comb)
    assert torch.equal(inside[0], collapse(streams, pre))
    assert torch.equal(inside[1], expand(y, streams, post, comb))


# ------------------------------------------------------------------ a whole site, with gradients


class Site:
    """A site around a sublayer whose output `y` is given, so that each gradient is rounded as often as it says.

    Args:
        module: Coefficients with uneven scales.
        shape: Of the streams, [B, S, C, H].
        dtype: Of the streams.
    """

    def __init__(self, module: HyperConnection, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        batch, length, streams, hidden = shape
        self.module = module.to(wide)
        self.streams = random(*shape, seed=31).to(dtype).requires_grad_()
        self.carried = random(batch, length, streams, seed=32).to(wide).requires_grad_()
        self.y = random(batch, length, hidden, seed=33).to(dtype).requires_grad_()
        outputs = ((batch, length, hidden), *[(batch, length, streams)] * 2, (*shape[:3], streams), shape)
        kinds = (dtype, wide, wide, wide, dtype)
        self.incoming = [random(*of, seed=34).to(kind) for of, kind in zip(outputs, kinds, strict=True)]

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"streams": self.streams, "carried": self.carried, "y": self.y} | dict(self.module.named_parameters())

    def forward(self) -> list[Tensor]:
        """x, pre, post, comb and the streams behind the site."""
        x, pre, post, comb = self.module(self.streams, self.carried)
        return [x, pre, post, comb, self.module.write(self.y, self.streams, post, comb)]

    def exact(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The same and all gradients by autograd from the formulas, in float64."""
        leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in self.leaves.items()}
        module, streams = self.module, leaves["streams"]
        count = streams.shape[2]
        flat = streams.flatten(-2)
        normed = flat / (flat.square().mean(-1, keepdim=True) + module.norm_eps).sqrt()
        mixes = normed @ leaves["fn"].T
        parts = [
            mixes[..., rows] * leaves["scale"][index] + leaves["base"][rows]
            for index, rows in enumerate((slice(0, count), slice(count, 2 * count), slice(2 * count, None)))
        ]
        comb = parts[2].unflatten(-1, (count, count)).softmax(-1) + module.eps
        for step in range(2 * module.iterations - 1):
            comb = comb / (comb.sum(-1 if step % 2 else -2, keepdim=True) + module.eps)
        x = torch.einsum("bsc,bsch->bsh", leaves["carried"], streams)
        post = 2 * parts[1].sigmoid()
        out = torch.einsum("bso,bsh->bsoh", post, leaves["y"]) + torch.einsum("bsio,bsih->bsoh", comb, streams)
        outputs = [x, parts[0].sigmoid() + module.eps, post, comb, out]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), [g.double() for g in self.incoming])
        return outputs, dict(zip(leaves, gradients, strict=True))


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(
    ("dtype", "bound", "narrow"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 5e-6, 5e-6), (torch.bfloat16, 5e-6, 3e-3)],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("shape", [(2, 7, 4, 6), (1, 13, 3, 10)], ids=str)
def test_values_and_gradients_of_a_site_equal_its_formulas(
    tiny_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    chunk: int,
    dtype: torch.dtype,
    bound: float,
    narrow: float,
) -> None:
    monkeypatch.setattr(mixing, "CHUNK_BYTES", chunk * shape[2] * shape[3] * 4 + 3)
    module = make_site(tiny_config, *shape[2:], hc_eps=0.01, rms_norm_eps=0.1, hc_sinkhorn_iters=5)
    site = Site(module, shape, dtype)
    chunks = list(mixing._chunks(site.streams))
    assert len(chunks) == -(-shape[0] * shape[1] // chunk), "as many tokens at a time as the case says"
    outputs = site.forward()
    gradients = torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming)
    expected, expected_gradients = site.exact()
    for ours, exact, incoming in zip(outputs, expected, site.incoming, strict=True):
        assert ours.dtype == incoming.dtype
        assert distance(ours, exact) <= (narrow if ours.dtype == torch.bfloat16 else bound)
    for (name, leaf), ours in zip(site.leaves.items(), gradients, strict=True):
        assert ours.dtype == leaf.dtype
        exact = expected_gradients[name]
        assert exact.norm() > 1e-2, name
        assert distance(ours, exact) <= (narrow if ours.dtype == torch.bfloat16 else bound), name


def test_parameters_narrower_than_fp32_get_gradients_of_their_own_dtype(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.bfloat16)
    site.module.to(torch.bfloat16)
    outputs = site.forward()
    assert [out.dtype for out in outputs[1:4]] == [torch.float32] * 3
    gradients = torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming)
    for (name, leaf), ours, exact in zip(site.leaves.items(), gradients, site.exact()[1].values(), strict=True):
        assert ours.dtype == leaf.dtype
        assert distance(ours, exact) <= 3e-3 if name != "carried" else 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_collapse_equal_its_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "CHUNK_BYTES", 4 * 3 * 7 * 4)
    streams, pre = random(2, 5, 3, 7, seed=35).to(dtype).requires_grad_(), random(2, 5, 3, seed=36).requires_grad_()
    incoming = random(2, 5, 7, seed=37).to(dtype)
    ours = torch.autograd.grad(collapse(streams, pre), (streams, pre), incoming)
    exact_streams = torch.einsum("bsc,bsh->bsch", pre.double(), incoming.double())
    assert distance(ours[0], exact_streams) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)
    assert distance(ours[1], torch.einsum("bsch,bsh->bsc", streams.double(), incoming.double())) <= 1e-6


def test_layouts_make_no_difference(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (3, 5, 4, 6), torch.float32)
    site.incoming = [part[:1, :1].expand(part.shape) for part in site.incoming]  # stride 0, as behind a sum
    expected = torch.autograd.grad(site.forward(), list(site.leaves.values()), [g.contiguous() for g in site.incoming])
    for ours, theirs in zip(
        torch.autograd.grad(site.forward(), list(site.leaves.values()), site.incoming), expected, strict=True
    ):
        assert torch.equal(ours, theirs)
    for name in ("streams", "carried", "y"):
        tensor = getattr(site, name).detach()
        setattr(site, name, tensor.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_())
    assert not site.streams.is_contiguous()
    for ours, theirs in zip(
        torch.autograd.grad(site.forward(), list(site.leaves.values()), site.incoming), expected, strict=True
    ):
        assert torch.equal(ours, theirs)


class Made(TorchDispatchMode):
    """Remembers the names of operations, and elements and dtype of every storage that one of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tensors: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.tensors.append((tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype))
        return out

    def at_least(self, elements: int) -> list[torch.dtype]:
        return [dtype for count, dtype in self.tensors if count >= elements]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_site_makes_nothing_as_large_as_the_streams_but_its_results_and_saves_nothing_as_large(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(mixing, "CHUNK_BYTES", 8 * 4 * 32 * 4)
    site = Site(make_site(tiny_config, 4, hidden=32), (1, 64, 4, 32), dtype)
    size = site.streams.numel()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with Made() as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = site.forward()
    assert forward.at_least(size) == [dtype], "the streams behind the site"
    shared = site.streams.untyped_storage().data_ptr()
    own = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() != shared]
    assert len(saved) - len(own) == 2, "the streams as they came, for both sides"
    assert sum(tensor.numel() for tensor in own if tensor.dtype == torch.float32) > 64 * 24, "coefficients"
    assert max(tensor.numel() for tensor in own) < size / 2
    with Made() as backward:
        torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming, retain_graph=True)
    # Autograd adds in place, but not in sight of a dispatch mode.
    assert backward.at_least(size) == [dtype] * 3, "one gradient from each side, and the sum"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming)
    added = [event.name for event in profiled.events() or () if event.input_shapes[:2] == [[*site.streams.shape]] * 2]
    assert added == ["aten::add_"]
    with Made() as formulas:
        site.exact()
    assert len(formulas.at_least(size)) > 10, "the watch sees what there is"


def test_nothing_is_computed_that_nobody_needs(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32)
    names = list(site.leaves)
    outputs = site.forward()
    all_of_them = torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming)

    def products(wanted: list[str]) -> int:
        for name, leaf in site.leaves.items():
            leaf.requires_grad_(name in wanted)
        pairs = [(out, g) for out, g in zip(site.forward(), site.incoming, strict=True) if out.requires_grad]
        with Made() as made:
            gradients = torch.autograd.grad(
                [out for out, _ in pairs], [site.leaves[name] for name in wanted], [g for _, g in pairs]
            )
        for name, ours in zip(wanted, gradients, strict=True):
            torch.testing.assert_close(ours, all_of_them[names.index(name)])
        return sum("mm" in name for name in made.names)

    # One product for each of y, carried, fn, post and comb, two for the streams, which feed both sides.
    assert products(names) == 7
    assert products([name for name in names if name != "fn"]) == 6
    assert products(["y"]) == 1
    assert products(["base"]) == 2  # through post and comb
    assert products(["fn"]) == 3
    assert products(["streams"]) == 4


def test_no_tokens_and_no_graph(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (1, 0, 4, 6), torch.float32)
    gradients = torch.autograd.grad(site.forward(), list(site.leaves.values()), site.incoming)
    assert [g.shape for g in gradients] == [leaf.shape for leaf in site.leaves.values()]
    assert not any(g.any() for g in gradients)

    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32)
    with torch.no_grad():
        alone = site.forward()
    for ours, theirs in zip(alone, site.forward(), strict=True):
        assert torch.equal(ours, theirs)
        assert theirs.requires_grad
        assert not ours.requires_grad


def test_recomputation_gives_the_same_gradients(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32)
    leaves = list(site.leaves.values())
    expected = torch.autograd.grad(site.forward(), leaves, site.incoming)
    recomputed = checkpoint(site.forward, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(recomputed, leaves, site.incoming), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_bit_equal_under_autocast(tiny_config: MakeConfig) -> None:
    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32)
    leaves = list(site.leaves.values())
    expected = torch.autograd.grad(site.forward(), leaves, site.incoming)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(site.forward(), leaves, site.incoming)
    for ours, theirs in zip(inside, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("index", [0, 1, 4], ids=["read", "coefficients", "written"])
def test_a_second_derivative_is_refused(tiny_config: MakeConfig, index: int) -> None:
    site = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32)
    loss = site.forward()[index].square().sum()
    (gradient,) = torch.autograd.grad(loss, site.streams, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


# ------------------------------------------------------------------ compiled core


@pytest.fixture
def counting_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """torch.compile with a quick backend that counts graphs; the process-wide switch is off before and after."""
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=counter, **options))
    fresh = CompiledCore("mHC expansion", mixing._expand_core, mixing._expand_eager)
    monkeypatch.setitem(mixing.IMPLEMENTATIONS, "compiled", fresh)
    yield counter
    torch._dynamo.reset()


# torch's tracer itself looks at `.grad` of inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_core_equals_the_formulas(
    counting_compiler: CompileCounterWithBackend, tiny_config: MakeConfig, dtype: torch.dtype
) -> None:
    site = Site(make_site(tiny_config, 4, backend=BackendConfig(compile_hc=True)), (2, 5, 4, 6), dtype)
    for _ in range(2):
        outputs = site.forward()
        gradients = torch.autograd.grad(outputs, list(site.leaves.values()), site.incoming)
        assert counting_compiler.frame_count == 1
    expected, expected_gradients = site.exact()
    for ours, exact in zip(
        (*outputs, *gradients), (*expected, *(expected_gradients[name] for name in site.leaves)), strict=True
    ):
        assert distance(ours, exact) <= (3e-3 if ours.dtype == torch.bfloat16 else 5e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_model_that_asks_for_it_runs_the_compiled_core_and_equals_eager(
    counting_compiler: CompileCounterWithBackend, golden_model: MakeModel, golden: dict[str, Tensor]
) -> None:
    # In float64: an fp32 rounding of another kernel can move a cache value or a selection further on.
    arguments = {name: golden[name] for name in ("input_ids", "attention_mask", "labels")}
    eager = golden_model().double()
    expected = eager(**arguments)
    expected.loss.backward()
    assert counting_compiler.frame_count == 0
    model = golden_model(backend=BackendConfig(compile_hc=True)).double()
    out = model(**arguments)
    out.loss.backward()
    assert counting_compiler.frame_count == 1, "all sites share one shape"
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-12, rtol=0)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-10, name


def test_a_failing_compiler_leaves_the_eager_core(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tiny_config: MakeConfig
) -> None:
    def broken(function: Any, **_: Any) -> Any:
        assert function is mixing._expand_core
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    fresh = CompiledCore("mHC expansion", mixing._expand_core, mixing._expand_eager)
    monkeypatch.setitem(mixing.IMPLEMENTATIONS, "compiled", fresh)
    expected = Site(make_site(tiny_config, 4), (2, 5, 4, 6), torch.float32).forward()[-1]
    site = Site(make_site(tiny_config, 4, backend=BackendConfig(compile_hc=True)), (2, 5, 4, 6), torch.float32)
    with caplog.at_level(logging.WARNING, logger="dsv41"):
        for _ in range(2):
            written = site.forward()[-1]
            assert torch.equal(written, expected)
            assert type(written.grad_fn).__name__ == "_MixBackward"
    assert [record.getMessage() for record in caplog.records] == [
        "mHC expansion: compilation failed, running eager instead (no compiler)"
    ]


SCRIPT = """
import logging, sys
import torch
from torch._dynamo.utils import counters
from dsv41.ops import mixing as hc

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
generator = torch.Generator().manual_seed(0)
shapes = ((2, 5, 8), (2, 5, 3, 8), (2, 5, 3), (2, 5, 3, 3))
leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
eager = hc.expand(*leaves)
compiled = hc.expand(*leaves, "compiled")
torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-5)
for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (compiled, eager)), strict=True):
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
assert counters["stats"]["unique_graphs"] == 1, counters
assert not counters["graph_break"], counters["graph_break"]
print("DONE")
"""


def test_the_core_compiled_to_native_code_equals_eager(tmp_path: Path) -> None:
    settings = {
        "PYTHONPATH": str(Path(dsv41.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "INFO compiling the mHC expansion" in done.stdout
    assert "INFO mHC expansion compiled in" in done.stdout
    assert "WARNING" not in done.stdout
    assert "DONE" in done.stdout
    assert list((tmp_path / "cache").rglob("*.so")), "native code was made"


# ------------------------------------------------------------------ sites of the model


def site_of(model: DeepseekV41ForCausalLM, layer: int, part: str) -> HyperConnection:
    return getattr(model.model.layers[layer], f"{part}_hc")


def replace_coefficients(site: HyperConnection, change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    original = site.forward

    def replaced(streams: Tensor, carried_pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, *coefficients = original(streams, carried_pre)
        return x, *change(*coefficients)

    site.forward = replaced  # type: ignore[method-assign]


def restore_coefficients(site: HyperConnection) -> None:
    del site.forward  # the instance's own, which hides the method


def feed_streams(model: DeepseekV41ForCausalLM, streams: Tensor) -> None:
    """Let block 0 start from `streams` instead of equal copies of the embedding, which hide which is which."""
    model.model.layers[0].register_forward_pre_hook(lambda _m, arguments: (streams, *arguments[1:]))


class Watch:
    """What every site reads: `streams` at its hyper-connection, and `reads` at its norm; index 12 is the end."""

    def __init__(self, model: DeepseekV41ForCausalLM) -> None:
        self.streams: list[Tensor] = []
        self.reads: list[Tensor] = []
        self.written: list[Tensor] = []
        self.pre: list[Tensor] = []
        for layer, part in SITES:
            block = model.model.layers[layer]
            site_of(model, layer, part).register_forward_hook(self._site)
            getattr(block, f"{part}_norm").register_forward_hook(lambda _m, args, _o: self.reads.append(args[0]))
            if part == "ffn":
                block.register_forward_hook(lambda _m, _a, out: self.written.append(out[0]))
        model.model.norm.register_forward_hook(lambda _m, args, _o: self.reads.append(args[0]))

    def _site(self, _module: Any, args: Any, out: Any) -> None:
        if len(self.streams) % 2:
            self.written.append(args[0])  # the MoE site sees what the attention site wrote
        self.streams.append(args[0])
        self.pre.append(out[1])


@torch.no_grad()
def test_a_permutation_as_mixer_moves_the_streams_at_every_site(golden_model: MakeModel) -> None:
    model = golden_model()
    feed_streams(model, random(1, 13, 4, 64, seed=24))
    cycles = []
    for index, (layer, part) in enumerate(SITES):
        shift = (1, 3)[index % 2]
        cycle = torch.zeros(4, 4)
        for i in range(4):
            cycle[i, (i + shift) % 4] = 1
        cycles.append(shift)

        def change(pre: Tensor, post: Tensor, comb: Tensor, cycle: Tensor = cycle) -> tuple[Tensor, Tensor, Tensor]:
            return pre, torch.zeros_like(post), cycle.expand_as(comb)

        replace_coefficients(site_of(model, layer, part), change)
    watch = Watch(model)
    model(IDS)
    assert len(watch.streams) == len(watch.written) == 12
    for before, after, shift in zip(watch.streams, watch.written, cycles, strict=True):
        for i in range(4):
            assert torch.equal(after[:, :, (i + shift) % 4], before[:, :, i])
        assert not torch.equal(after, before)


@torch.no_grad()
def test_post_writes_the_output_of_its_own_sublayer_at_every_site(golden_model: MakeModel) -> None:
    model = golden_model()
    post_row = torch.tensor([0.0, 1.0, 0.0, -2.0])
    outputs: list[Tensor] = []
    for layer, part in SITES:
        replace_coefficients(
            site_of(model, layer, part), lambda pre, post, comb: (pre, post_row.expand_as(post), torch.zeros_like(comb))
        )
        getattr(model.model.layers[layer], part).register_forward_hook(
            lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
    watch = Watch(model)
    model(IDS)
    for written, y in zip(watch.written, outputs, strict=True):
        assert torch.equal(written, post_row.view(4, 1) * y.unsqueeze(2))


@torch.no_grad()
def test_every_single_coefficient_matters_at_every_site(golden_model: MakeModel) -> None:
    # Row 0 of the batch is the model as it is; each other row has one coefficient of one site moved.
    model = golden_model(backend=BackendConfig(attn="eager", experts="dense"))
    rows = 1 + 4 + 4 + 16
    feed_streams(model, random(1, 13, 4, 64, seed=29).expand(rows, -1, -1, -1))

    def change(pre: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = torch.cat((pre, post, comb.flatten(-2)), dim=-1).clone()
        for row in range(1, rows):
            parts[row, :, row - 1] += 0.25
        return parts[..., :4], parts[..., 4:8], parts[..., 8:].unflatten(-1, (4, 4))

    for layer, part in SITES:
        site = site_of(model, layer, part)
        replace_coefficients(site, change)
        logits = model(IDS.expand(rows, -1)).logits
        restore_coefficients(site)
        moved = (logits[1:] - logits[:1]).abs().amax((1, 2))
        assert (moved > 1e-2).all(), (layer, part, moved)
        # No two coefficients have the same effect, so none stands in for another.
        flat = logits[1:].flatten(1)
        distances = (flat.unsqueeze(0) - flat.unsqueeze(1)).abs().amax(-1) + torch.eye(rows - 1)
        assert distances.min() > 1e-2, (layer, part, distances.min())


@torch.no_grad()
def test_each_site_reads_with_the_mix_of_the_site_before_it(golden_model: MakeModel) -> None:
    model = golden_model()
    feed_streams(model, random(1, 13, 4, 64, seed=25))
    watch = Watch(model)
    model(IDS)
    assert len(watch.reads) == 13
    assert torch.equal(watch.reads[0], watch.streams[0][:, :, 0])  # block 0's attention reads stream 0
    read_from = [*watch.streams[1:], watch.written[-1]]
    for pre, streams, read in zip(watch.pre, read_from, watch.reads[1:], strict=True):
        expected = torch.zeros_like(read, dtype=torch.float64)
        for c in range(4):
            expected += pre[:, :, c : c + 1].double() * streams[:, :, c].double()
        torch.testing.assert_close(read.double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_changed_pre_acts_one_site_later_and_no_sooner(golden_model: MakeModel) -> None:
    model = golden_model()
    feed_streams(model, random(1, 13, 4, 64, seed=26))
    watch = Watch(model)

    def reads() -> list[Tensor]:
        watch.reads.clear()
        model(IDS)
        return watch.reads.copy()

    before = reads()
    shift = torch.tensor([0.5, -0.2, 0.9, 0.1])
    for index, (layer, part) in enumerate(SITES):
        site = site_of(model, layer, part)
        replace_coefficients(site, lambda pre, post, comb: (pre + shift, post, comb))
        after = reads()
        restore_coefficients(site)
        for earlier in range(index + 1):
            assert torch.equal(before[earlier], after[earlier]), (index, earlier)
        assert (before[index + 1] - after[index + 1]).abs().max() > 1e-2, index


@pytest.mark.parametrize(
    ("streams", "carried"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
def test_a_block_refuses_carried_coefficients_of_another_dtype(
    tiny_model: MakeModel, streams: torch.dtype, carried: torch.dtype
) -> None:
    block = tiny_model().model.layers[0].to(streams)
    x = torch.zeros(1, 3, 4, 64, dtype=streams)
    tokens = check_inputs(torch.arange(3).unsqueeze(0), limit=9, longest=9, strict=True)
    with pytest.raises(TypeError, match=r"^pre_mix: carried mixing coefficients must stay torch\.float"):
        block(x, torch.zeros(1, 3, 4, dtype=carried), AttentionState(), tokens)


@pytest.mark.parametrize(
    ("streams", "carried"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_a_block_keeps_the_dtypes_of_streams_and_coefficients(
    tiny_model: MakeModel, streams: torch.dtype, carried: torch.dtype
) -> None:
    block = tiny_model().model.layers[0].to(streams)
    x = random(1, 3, 4, 64, seed=27).to(streams)
    tokens = check_inputs(torch.arange(3).unsqueeze(0), limit=9, longest=9, strict=True)
    out, mix, *_ = block(x, random(1, 3, 4, seed=28).to(carried), AttentionState(), tokens)
    assert out.dtype == streams
    assert mix.dtype == carried


@pytest.mark.parametrize("streams", [1, 2, 4, 5])
def test_a_new_site_reads_the_mean_of_its_streams(tiny_config: MakeConfig, streams: int) -> None:
    """With coefficients that depend on the base alone, `pre` is 1 / C; a single stream has a sigmoid of zero."""
    config = tiny_config(hidden_size=6, hc_mult=streams, hc_eps=1e-12).text_config
    site = HyperConnection(config, BackendConfig()).double()
    torch.nn.init.zeros_(site.scale)
    carried = torch.full((1, 3, streams), 1 / streams, dtype=torch.float64)
    _, pre, post, comb = site(random(1, 3, streams, 6, seed=31).double(), carried)
    expected = 1 / streams if streams > 1 else 0.5
    torch.testing.assert_close(pre, torch.full_like(pre, expected), atol=1e-7, rtol=0)
    torch.testing.assert_close(post, torch.ones_like(post))
    off = comb[..., 0, 1:] if streams > 1 else comb[..., :0]
    assert (comb.diagonal(dim1=-2, dim2=-1) > 0.9).all()
    assert (off > 0).all()
