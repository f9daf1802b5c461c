"""Single-pass mHC: coefficients, Sinkhorn, collapse and expand against hand-written loops, and the hand-off.

The second half looks at the model from outside: what each site reads and how streams move there is observed at the
inputs of norms and hyper-connections while one site's coefficients are replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState
from dsv41.hyper_connections import HyperConnection, collapse, expand, sinkhorn

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


# ------------------------------------------------------------------ coefficients


def make_site(tiny_config: MakeConfig, streams: int, hidden: int = 6, **overrides: Any) -> HyperConnection:
    config = tiny_config(hidden_size=hidden, hc_mult=streams, **overrides).text_config
    site = HyperConnection(config)
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
    x = random(2, 3, streams, 6, seed=4) * 2
    ours = site(x)
    for row in range(2):
        for token in range(3):
            expected = coefficients_by_hand(site, x[row, token], hc_eps, rms_eps, 7)
            for mine, theirs in zip(ours, expected, strict=True):
                theirs = torch.tensor(theirs, dtype=torch.float64)
                torch.testing.assert_close(mine[row, token].detach().double(), theirs, rtol=2e-5, atol=1e-6)


def test_coefficients_of_bf16_streams_are_fp32(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 4)
    x = random(2, 3, 4, 6, seed=5).bfloat16()
    for ours, exact in zip(site(x), site(x.float()), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, exact)


def test_coefficients_of_float64_streams_are_float64(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 3).double()
    assert {part.dtype for part in site(random(1, 2, 3, 6, seed=5, dtype=torch.float64))} == {torch.float64}


def test_coefficients_are_bit_equal_under_autocast(tiny_config: MakeConfig) -> None:
    site = make_site(tiny_config, 4)
    x = random(2, 3, 4, 6, seed=6)
    with torch.autocast("cpu", torch.bfloat16):
        inside = site(x)
    for ours, exact in zip(inside, site(x), strict=True):
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


# ------------------------------------------------------------------ sites of the model


def site_of(model: DeepseekV41ForCausalLM, layer: int, part: str) -> HyperConnection:
    return getattr(model.model.layers[layer], f"{part}_hc")


def replace_coefficients(site: HyperConnection, change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    original = site.forward
    site.forward = lambda streams: change(*original(streams))  # type: ignore[method-assign]


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
        self.pre.append(out[0])


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
    positions, live = torch.arange(3).unsqueeze(0), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"^pre_mix: carried mixing coefficients must stay torch\.float"):
        block(x, torch.zeros(1, 3, 4, dtype=carried), AttentionState(), positions, live)


@pytest.mark.parametrize(
    ("streams", "carried"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_a_block_keeps_the_dtypes_of_streams_and_coefficients(
    tiny_model: MakeModel, streams: torch.dtype, carried: torch.dtype
) -> None:
    block = tiny_model().model.layers[0].to(streams)
    x = random(1, 3, 4, 64, seed=27).to(streams)
    positions, live = torch.arange(3).unsqueeze(0), torch.ones(1, 3, dtype=torch.bool)
    out, mix, _ = block(x, random(1, 3, 4, seed=28).to(carried), AttentionState(), positions, live)
    assert out.dtype == streams
    assert mix.dtype == carried
