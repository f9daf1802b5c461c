"""Rotations by position, seen through the attention module, against the closed form in float64.

Position p turns the pair of channels (2i, 2i + 1) by p * f_i. Layers of ratio 0 use f_i = theta^(-2i / width); the
compressed ones a base of their own, and YaRN on the frequencies (arXiv:2309.00071, section 3.2) without a factor on
the attention. What a module rotates is caught just before the rotation (outputs of its projections) and just after
it (arguments of the attention core and of the quantisers), at positions up to 4000.

The rotation itself, which writes in place and has a backward of its own, is compared in every bit with one complex
product of the pairs as autograd sees it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.ops import dense_attention
from dsv41.ops.rope import layer_frequencies, rotate, rotation_table, yarn_frequencies

MakeConfig = Callable[..., DeepseekV41Config]

HEADS, WIDTH, ROPE, INDEX_HEADS, INDEX_WIDTH = 2, 12, 8, 1, 10
LENGTH = 4003
THETA, COMPRESSED_THETA = 10000.0, 160000.0
# With this the four pairs get four different slow-downs, and the slowest ones turn visibly by position 4000.
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 40,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
# An angle near 4000 radians, made of fp32 numbers, is off by up to about 4000 * 2^-24.
ATOL = 1.5e-3


def plain_frequencies(theta: float) -> list[float]:
    return [theta ** (-2 * pair / ROPE) for pair in range(ROPE // 2)]


def yarn_by_hand() -> list[float]:
    """Pairs with more than beta_fast turns in the original length keep their frequency, those with fewer than
    beta_slow are slowed by the factor; between, the released ramp is linear in the index of the pair."""

    def index_of(turns: float) -> float:
        # Pair i makes L * theta^(-2i / width) / (2 pi) turns.
        return ROPE / 2 * math.log(4096 / (2 * math.pi * turns), COMPRESSED_THETA)

    first, last = math.floor(index_of(40)), math.ceil(index_of(1))
    assert (first, last) == (0, 3)
    frequencies = []
    for pair, frequency in enumerate(plain_frequencies(COMPRESSED_THETA)):
        share = min(max((pair - first) / (last - first), 0.0), 1.0)
        frequencies.append(frequency * ((1 - share) + share / 16))
    return frequencies


def frequencies_of(ratio: int) -> list[float]:
    return plain_frequencies(THETA) if ratio == 0 else yarn_by_hand()


def turned(vector: Tensor, position: int, frequencies: list[float], sign: int = 1) -> Tensor:
    """`vector` [channels] with its last ROPE channels rotated, by real arithmetic on adjacent pairs."""
    values = vector.double().tolist()
    start = len(values) - ROPE
    for pair, frequency in enumerate(frequencies):
        a, b = values[start + 2 * pair], values[start + 2 * pair + 1]
        cos, sin = math.cos(position * frequency), sign * math.sin(position * frequency)
        values[start + 2 * pair], values[start + 2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Caught:
    """Tensors of one forward, before (`raw_*`) and after the rotation."""

    q: Tensor
    kv: Tensor
    mask: Tensor
    out: Tensor
    raw_out: Tensor
    raw_q: Tensor
    raw_kv: Tensor
    raw_latent: Tensor | None = None
    raw_index_q: Tensor | None = None
    raw_index_k: Tensor | None = None
    index_q: Tensor | None = None
    index_k: Tensor | None = None


def make_config(tiny_config: MakeConfig, ratio: int, **overrides: Any) -> Any:
    fields: dict[str, Any] = {
        "num_hidden_layers": 1,
        "compress_ratios": [ratio],
        "kv_source_layer_ids": [0] if ratio else [],
        "index_source_layer_ids": [0] if ratio else [],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "hidden_size": HEADS * WIDTH,
        "num_attention_heads": HEADS,
        "head_dim": WIDTH,
        "qk_rope_head_dim": ROPE,
        "o_groups": 1,
        "o_lora_rank": HEADS * WIDTH,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_WIDTH,
        "max_position_embeddings": 8192,
        "rope_theta": THETA,
        "compress_rope_theta": COMPRESSED_THETA,
        "rope_scaling": YARN,
    }
    return tiny_config(**(fields | overrides)).text_config


@pytest.fixture
def catch(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Caught]:
    """Runs one layer of a ratio over LENGTH positions with quantisers off and a recorder as attention core."""

    def run(ratio: int) -> Caught:
        torch.manual_seed(ratio)
        module = DeepseekV41Attention(make_config(tiny_config, ratio), 0, BackendConfig(attn="eager"))
        with torch.no_grad():  # the output projection becomes the identity
            module.wo_a.weight.copy_(torch.eye(HEADS * WIDTH))
            module.wo_b.weight.copy_(torch.eye(HEADS * WIDTH))
        caught: dict[str, Tensor] = {}
        after_rotation: list[Tensor] = []

        def identity(x: Tensor, name: str) -> Tensor:
            return x

        def recording_identity(x: Tensor, name: str) -> Tensor:
            after_rotation.append(x)
            return x

        monkeypatch.setattr("dsv41.attention.fake_quantize", identity)
        monkeypatch.setattr("dsv41.indexer.fake_quantize", recording_identity)
        # The choice is no concern here, and its integers over 4000 x 4000 positions would be large.
        monkeypatch.setattr(
            "dsv41.indexer.stable_topk", lambda scores, count: torch.full((*scores.shape[:-1], 1), -1, dtype=torch.long)
        )

        def core(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
            caught.update(q=q, kv=kv, mask=mask)
            caught["raw_out"] = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
            return caught["raw_out"]

        monkeypatch.setitem(dense_attention.MASKED_ATTENTION, "eager", core)

        def keep(name: str, part: torch.nn.Module) -> None:
            part.register_forward_hook(lambda _m, _a, out: caught.__setitem__(name, out))

        keep("raw_q", module.wq_b)
        keep("raw_kv", module.kv_norm)
        if ratio:
            assert module.compressor is not None
            assert module.indexer is not None
            assert module.indexer.k_norm is not None
            keep("raw_latent", module.compressor)
            keep("raw_index_q", module.indexer.wq_b)
            keep("raw_index_k", module.indexer.k_norm)
        x = torch.randn(1, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(ratio + 10))
        positions = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            caught["out"], _ = module(x, AttentionState(), positions, torch.ones(1, LENGTH, dtype=torch.bool))
        if ratio:
            caught["index_k"], caught["index_q"] = after_rotation
        return Caught(**caught)

    return run


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_queries_window_keys_and_outputs_turn_by_the_position_of_the_query(
    catch: Callable[[int], Caught], ratio: int
) -> None:
    caught = catch(ratio)
    frequencies = frequencies_of(ratio)
    raw_q = caught.raw_q.view(1, LENGTH, HEADS, WIDTH)
    for position in (0, 1, 100, 4000):
        expected = turned(caught.raw_kv[0, position], position, frequencies)
        torch.testing.assert_close(caught.kv[0, position].double(), expected, atol=ATOL, rtol=0)
        for head in range(HEADS):
            expected = turned(raw_q[0, position, head], position, frequencies)
            torch.testing.assert_close(caught.q[0, position, head].double(), expected, atol=ATOL, rtol=0)
            expected = turned(caught.raw_out[0, position, head], position, frequencies, sign=-1)
            ours = caught.out[0, position].view(HEADS, WIDTH)[head]
            torch.testing.assert_close(ours.double(), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(("ratio", "positions"), [(1, (0, 1, 100, 4000)), (2, (0, 2, 100, 4000))])
def test_compressed_and_index_keys_turn_by_the_first_token_of_their_group(
    catch: Callable[[int], Caught], ratio: int, positions: tuple[int, ...]
) -> None:
    caught = catch(ratio)
    assert caught.raw_latent is not None
    assert caught.raw_index_k is not None
    assert caught.index_k is not None
    compressed = caught.kv[0, LENGTH:]
    assert len(compressed) == LENGTH // ratio
    for position in positions:
        group = position // ratio
        expected = turned(caught.raw_latent[0, group], position, yarn_by_hand())
        torch.testing.assert_close(compressed[group].double(), expected, atol=ATOL, rtol=0)
        expected = turned(caught.raw_index_k[0, group], position, yarn_by_hand())
        torch.testing.assert_close(caught.index_k[0, group].double(), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("ratio", [1, 2])
def test_index_queries_turn_by_the_position_of_the_query(catch: Callable[[int], Caught], ratio: int) -> None:
    caught = catch(ratio)
    assert caught.raw_index_q is not None
    assert caught.index_q is not None
    for position in (0, 1, 100, 4000):
        raw = caught.raw_index_q[0, position].view(INDEX_HEADS, INDEX_WIDTH)
        for head in range(INDEX_HEADS):
            expected = turned(raw[head], position, yarn_by_hand())
            torch.testing.assert_close(caught.index_q[0, position, head].double(), expected, atol=ATOL, rtol=0)


def test_the_tolerance_tells_the_candidates_apart() -> None:
    """Wrong positions, wrong bases, no YaRN and split halves all lie far outside ATOL for the vectors used above."""
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    right = turned(vector, 4000, yarn_by_hand())
    split = vector.clone()
    split[WIDTH - ROPE :] = vector[WIDTH - ROPE :].view(2, -1).T.reshape(-1)
    wrong = [
        turned(vector, 2000, yarn_by_hand()),
        turned(vector, 3999, yarn_by_hand()),
        turned(vector, 4000, plain_frequencies(COMPRESSED_THETA)),
        turned(vector, 4000, plain_frequencies(THETA)),
        turned(vector, 4000, yarn_by_hand(), sign=-1),
        turned(split, 4000, yarn_by_hand()),
    ]
    for other in wrong:
        assert (right - other).abs().max() > 100 * ATOL


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_is_monotone_between() -> None:
    """The paper's own definition of the two ends, at the released sizes."""
    scaling = {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    }
    ours = yarn_frequencies(64, COMPRESSED_THETA, scaling).tolist()
    kept = slowed = 0
    shares = []
    for pair, value in enumerate(ours):
        plain = COMPRESSED_THETA ** (-2 * pair / 64)
        turns = 65536 * plain / (2 * math.pi)
        share = value / plain
        shares.append(share)
        # The ramp starts and ends at whole pairs, so the pair next to an end belongs to that end already.
        if turns >= 32 * COMPRESSED_THETA ** (2 / 64):
            kept += 1
            assert share == pytest.approx(1.0, rel=1e-5)
        elif turns <= COMPRESSED_THETA ** (-2 / 64):
            slowed += 1
            assert share == pytest.approx(1 / 16, rel=1e-5)
        elif 1 < turns < 32:
            assert 1 / 16 < share < 1
    assert kept >= 10
    assert slowed >= 3
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(shares))
    assert len({round(share, 4) for share in shares}) > 8


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}], ids=["none", "default"])
def test_without_scaling_compressed_layers_have_plain_frequencies(
    tiny_config: MakeConfig, scaling: dict[str, Any] | None
) -> None:
    text = make_config(tiny_config, 2, rope_scaling=scaling)
    expected = plain_frequencies(COMPRESSED_THETA)
    assert layer_frequencies(text, True).tolist() == pytest.approx(expected, rel=1e-6)
    assert layer_frequencies(text, False).tolist() == pytest.approx(plain_frequencies(THETA), rel=1e-6)


def test_yarn_changes_compressed_layers_only(tiny_config: MakeConfig) -> None:
    text = make_config(tiny_config, 2)
    assert layer_frequencies(text, True).tolist() == pytest.approx(yarn_by_hand(), rel=1e-6)
    assert layer_frequencies(text, False).tolist() == pytest.approx(plain_frequencies(THETA), rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 5, 11), (2, 5, 3, 11)])
def test_rotation_keeps_norms_and_other_channels_and_can_be_undone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 7, 900, 4000], [3, 2, 50, 0, 77]])
    table = rotation_table(torch.tensor([1.0, 0.3, 0.007]), positions)
    ours = rotate(x, table)
    assert ours.shape == x.shape
    assert torch.equal(ours[..., :5], x[..., :5])
    moved = ours[..., 5:] != x[..., 5:]
    assert moved[positions > 0].all()
    assert not moved[positions == 0].any()
    pairs = (*shape[:-1], 3, 2)
    torch.testing.assert_close(ours[..., 5:].reshape(pairs).norm(dim=-1), x[..., 5:].reshape(pairs).norm(dim=-1))
    torch.testing.assert_close(rotate(ours, table, inverse=True), x, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotate(x, table.conj()), rotate(x, table, inverse=True))


def test_scores_of_rotated_vectors_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    frequencies = torch.tensor(plain_frequencies(THETA))

    def score(query_position: int, key_position: int) -> float:
        left = rotate(q, rotation_table(frequencies, torch.tensor([[query_position]])))
        right = rotate(k, rotation_table(frequencies, torch.tensor([[key_position]])))
        return float((left * right).sum())

    assert score(40, 31) == pytest.approx(score(109, 100), abs=1e-4)
    assert abs(score(40, 31) - score(31, 40)) > 1e-2


def test_a_table_for_all_rows_equals_one_table_per_row() -> None:
    x = torch.randn(2, 4, 3, 10, generator=torch.Generator().manual_seed(3))
    table = rotation_table(torch.tensor([0.9, 0.05]), torch.arange(4))
    # Strides decide whether torch fuses a complex product's additions, so the last bit may differ.
    torch.testing.assert_close(rotate(x, table), rotate(x, table.expand(2, -1, -1)), atol=1e-6, rtol=0)
    torch.testing.assert_close(rotate(x[:, :, 0], table), rotate(x, table)[:, :, 0], atol=1e-6, rtol=0)


def test_bf16_is_rotated_in_fp32_and_cast_once() -> None:
    x = torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    table = rotation_table(torch.tensor(plain_frequencies(THETA)), torch.arange(3900, 3964).unsqueeze(0))
    ours = rotate(x, table)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, rotate(x.float(), table).bfloat16())


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Pairs and other channels: rotated in place, and not for want of whole vectors or of an even number before them.
WIDTHS = [(16, 32), (32, 0), (48, 2), (16, 5), (4, 4), (3, 5), (1, 1), (20, 24)]


def plainly(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """One complex product of all pairs, laid out one behind the other."""
    still = x.shape[-1] - 2 * table.shape[-1]
    wide = x[..., still:].double() if x.dtype == torch.float64 else x[..., still:].float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    if x.dim() == 4:
        table = table.unsqueeze(-2)
    turned = torch.view_as_real(pairs * (table.conj() if inverse else table)).flatten(-2)
    return torch.cat((x[..., :still], turned.to(x.dtype)), dim=-1)


def rotation_inputs(
    pairs: int, still: int, heads: int | None, dtype: torch.dtype, per_row: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, an incoming gradient, and a table with positions of their own in every row or the same in all."""
    generator = torch.Generator().manual_seed(pairs)
    shape = (2, 7, 2 * pairs + still) if heads is None else (2, 7, heads, 2 * pairs + still)
    x, incoming = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    positions = torch.randint(0, 4000, (2, 7) if per_row else (7,), generator=generator)
    frequencies = torch.tensor([THETA ** (-pair / pairs) for pair in range(pairs)])
    return x, incoming, rotation_table(frequencies, positions)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize(("pairs", "still"), WIDTHS)
def test_values_and_gradients_equal_the_plain_product_in_every_bit(
    pairs: int, still: int, heads: int | None, per_row: bool, dtype: torch.dtype, inverse: bool
) -> None:
    x, incoming, table = rotation_inputs(pairs, still, heads, dtype, per_row)
    before = x.clone()
    x.requires_grad_()
    ours, expected = rotate(x, table, inverse), plainly(x, table, inverse)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, x)
    (gradient,), (exact,) = (torch.autograd.grad(out, x, incoming) for out in (ours, expected))
    assert torch.equal(gradient, exact)
    assert torch.equal(x, before)
    assert x._version == 0


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize(("pairs", "still"), [(16, 6), (3, 5)])
def test_gradients_equal_finite_differences(pairs: int, still: int, heads: int | None) -> None:
    x, _, table = rotation_inputs(pairs, still, heads, torch.float64)
    x = x[:, :2].clone().requires_grad_()
    for inverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, inverse=inverse: rotate(x, table[:, :2], inverse), (x,))


@pytest.mark.parametrize(("pairs", "still"), [(16, 32), (3, 5)])
def test_other_layouts_expanded_gradients_single_tokens_and_none(pairs: int, still: int) -> None:
    x, _, table = rotation_inputs(pairs, still, 7, torch.float32)
    for other in (x.transpose(1, 2), x[:, :, :1].expand_as(x), x.flip(1)[:, :, ::2]):
        other = other.detach().requires_grad_()
        ours, expected = rotate(other, table), plainly(other, table)
        assert ours.is_contiguous()
        assert torch.equal(ours, expected)
        assert torch.equal(*(torch.autograd.grad(out.sum(), other)[0] for out in (ours, expected)))
    alone, among = rotate(x[:1, 3:4, 0], table[:1, 3:4]), rotate(x[:, :, 0], table)[:1, 3:4]
    torch.testing.assert_close(alone, among, atol=1e-6, rtol=0)  # a remainder rounds differently, as above
    empty = torch.zeros(2, 0, 3, 2 * pairs + still, requires_grad=True)
    rotate(empty, table[:, :0]).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pairs", "still"), [(16, 32), (3, 5)])
def test_the_table_alone_is_kept_for_backward(pairs: int, still: int, dtype: torch.dtype, inverse: bool) -> None:
    x, _, table = rotation_inputs(pairs, still, 3, dtype)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert rotate(x.requires_grad_(), table, inverse).requires_grad
    assert [(tensor.data_ptr(), tensor.shape) for tensor in kept] == [(table.data_ptr(), table.shape)]


class Made(TorchDispatchMode):
    """Sizes in bytes of what operations made that is neither a view nor an input written to."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.endswith("_"):
            self.sizes.append(out.numel() * out.element_size())
        return out


@pytest.mark.parametrize(
    ("dtype", "pairs", "copies"), [(torch.float32, 16, False), (torch.float32, 4, True), (torch.bfloat16, 16, True)]
)
def test_one_result_is_made_and_rotating_channels_alone_are_copied(
    dtype: torch.dtype, pairs: int, copies: bool
) -> None:
    x, incoming, table = rotation_inputs(pairs, 64, 3, dtype)
    with Made() as forward:
        ours = rotate(x.requires_grad_(), table)
    with Made() as backward:
        torch.autograd.grad(ours, x, incoming)
    turning = x.numel() // x.shape[-1] * 2 * pairs * 4
    expected = [x.numel() * x.element_size(), *([turning] if copies else [])]
    assert forward.sizes == expected
    # On the way back the table is conjugated.
    assert sorted(backward.sizes) == sorted([*expected, table.numel() * 8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [16, 3])
def test_autocast_and_recomputation_change_nothing(pairs: int, dtype: torch.dtype) -> None:
    x, incoming, table = rotation_inputs(pairs, 4, 3, dtype)
    x.requires_grad_()
    with torch.no_grad():
        plain = rotate(x, table)
    assert not plain.requires_grad
    (gradient,) = torch.autograd.grad(rotate(x, table), x, incoming)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = checkpoint(rotate, x, table, use_reentrant=False)
        (recomputed,) = torch.autograd.grad(again, x, incoming)
    assert torch.equal(again, plain)
    assert torch.equal(recomputed, gradient)
