"""The indexer: which compressed positions a query selects, against a Python loop over ARCHITECTURE 5.

The reference scores in float64 and selects with `sorted`. It takes only the fake quantiser from the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.indexer import Indexer
from dsv41.ops import dense_attention
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import layer_frequencies, rotation_table
from dsv41.ops.selection import mask_to_candidates, membership, select_blocks, stable_topk, visible_positions

MakeConfig = Callable[..., DeepseekV41Config]
MakeModel = Callable[..., DeepseekV41ForCausalLM]

NOTHING = float("-inf")
WIDE = torch.float64
HIDDEN, LATENT, HEADS, WIDTH, ROPE = 14, 10, 3, 34, 6
TOPK, BLOCK, KEPT_BLOCKS = 4, 3, 2


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_rotations(frequencies: Tensor, positions: Tensor) -> Tensor:
    """`rotation_table` in float64, which by-hand comparisons need: fp32 rounds as the CPU does, and a rounding can move
    a quantised value by a whole step, and so the selection."""
    angles = positions.double().unsqueeze(-1) * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def make_config(tiny_config: MakeConfig, ratio: int, candidates: bool) -> Any:
    """Layers: 0 Full before the candidate source, 1 Full and candidate source, 2 Reindex, 3 Reuse, 4 Reindex."""
    return tiny_config(
        hidden_size=HIDDEN,
        q_lora_rank=LATENT,
        head_dim=12,
        qk_rope_head_dim=ROPE,
        num_hidden_layers=5,
        compress_ratios=[ratio] * 5,
        kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1, 2, 4],
        candidate_source_layer_id=1 if candidates else -1,
        candidate_topk_blocks=KEPT_BLOCKS,
        candidate_block_size=BLOCK,
        index_n_heads=HEADS,
        index_head_dim=WIDTH,
        index_topk=TOPK,
        engram_layer_ids=[],
        engram_num_embeddings=[],
    ).text_config


def make_indexer(config: Any, layer: int) -> Indexer:
    indexer = Indexer(config, layer)
    with torch.no_grad():
        for seed, parameter in enumerate(indexer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=100 * layer + seed))
    return indexer


# ------------------------------------------------------------------ reference


def turn(values: Tensor, position: int, frequencies: list[float]) -> Tensor:
    """Last channels of [..., E] rotated in adjacent pairs, float64."""
    out = values.double().clone()
    start = out.shape[-1] - 2 * len(frequencies)
    for pair, frequency in enumerate(frequencies):
        a, b = values[..., start + 2 * pair].double(), values[..., start + 2 * pair + 1].double()
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[..., start + 2 * pair], out[..., start + 2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def keys_by_hand(indexer: Indexer, config: Any, latent: Tensor, ratio: int) -> Tensor:
    assert indexer.wk is not None
    assert indexer.k_norm is not None
    frequencies = layer_frequencies(config, True).tolist()
    raw = latent.double() @ indexer.wk.weight.double().T
    raw = raw / (raw.square().mean(-1, keepdim=True) + 1e-20).sqrt() * indexer.k_norm.weight.double()
    turned = torch.stack([turn(raw[:, j], j * ratio, frequencies) for j in range(raw.shape[1])], dim=1)
    return fake_quantize(turned, "mxfp4")


def scores_by_hand(
    indexer: Indexer, config: Any, x: Tensor, q_latent: Tensor, keys: Tensor, groups: Tensor, ratio: int
) -> list[list[list[float]]]:
    frequencies = layer_frequencies(config, True).tolist()
    table = []
    for b in range(len(x)):
        rows = []
        for s in range(x.shape[1]):
            q = (indexer.wq_b.weight.double() @ q_latent[b, s].double()).view(HEADS, WIDTH)
            q = fake_quantize(turn(q, s, frequencies), "mxfp4")
            w = (indexer.weights_proj.weight.double() @ x[b, s].double()) / math.sqrt(WIDTH) / math.sqrt(HEADS)
            row = []
            for t in range(keys.shape[1]):
                visible = t < (s + 1) // ratio and bool(groups[b, t])
                products = [max(0.0, float(q[h] @ keys[b, t].double())) for h in range(HEADS)]
                row.append(sum(float(w[h]) * products[h] for h in range(HEADS)) if visible else NOTHING)
            rows.append(row)
        table.append(rows)
    return table


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the `count` best existing entries, ties to the lower index, ascending."""
    existing = [index for index, score in enumerate(scores) if score > NOTHING]
    return sorted(sorted(existing, key=lambda index: (-scores[index], index))[:count])


def best_blocks(scores: list[float], newest: int) -> list[int]:
    blocks = [max(scores[start : start + BLOCK]) for start in range(0, len(scores), BLOCK)]
    if newest >= 0 and blocks[newest // BLOCK] > NOTHING:
        blocks[newest // BLOCK] = math.inf
    return best(blocks, KEPT_BLOCKS)


def listed(selection: Tensor) -> list[list[list[int]]]:
    """Selection without its -1, after checking that they stand last and the rest ascends."""
    rows = []
    for row in selection.flatten(0, -2).tolist():
        live = [index for index in row if index >= 0]
        assert row == live + [-1] * (len(row) - len(live))
        assert live == sorted(set(live))
        rows.append(live)
    width = selection.shape[-2]
    return [rows[start : start + width] for start in range(0, len(rows), width)]


# ------------------------------------------------------------------ top-k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 9, 20])
def test_topk_equals_sorting_with_ties_to_the_lower_position(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randint(-3, 4, (40, 9), generator=generator) * 0.5
    scores[torch.rand(40, 9, generator=generator) < 0.3] = NOTHING
    scores[0] = NOTHING
    scores[1, 3] = math.inf
    scores = scores.to(dtype).view(4, 10, 9)
    ours = stable_topk(scores, count)
    assert ours.dtype == torch.int64
    assert ours.shape == (4, 10, min(count, 9))
    expected = [[best(row, count) for row in rows] for rows in scores.tolist()]
    assert listed(ours) == expected


def test_topk_orders_neighbouring_floats_of_both_signs() -> None:
    values = torch.tensor([1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38, 0.0])
    values = torch.cat((values, torch.nextafter(values, torch.tensor(math.inf)), torch.nextafter(values, -values - 1)))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    scores = values[order]
    for count in range(1, len(values)):
        assert listed(stable_topk(scores.view(1, 1, -1), count)) == [[best(scores.tolist(), count)]]


def test_negative_zero_ties_with_zero() -> None:
    assert stable_topk(torch.tensor([-0.0, 0.0, -1.0, -0.0, 0.0]), 2).tolist() == [0, 1]
    assert stable_topk(torch.tensor([0.0, -0.0, -1.0, 0.0, -0.0]), 3).tolist() == [0, 1, 3]
    assert stable_topk(torch.tensor([-1.0, -0.0, 0.0], dtype=torch.bfloat16), 1).tolist() == [1]


def test_rows_without_any_score_select_nothing() -> None:
    scores = torch.full((2, 3, 7), NOTHING)
    assert torch.equal(stable_topk(scores, 4), torch.full((2, 3, 4), -1))
    assert torch.equal(select_blocks(scores, 2, 3, 2), torch.full((2, 3, 2), -1))
    assert stable_topk(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)


def test_all_equal_scores_select_the_lowest_positions_whatever_the_length() -> None:
    for length in (5, 64, 1000, 5000):  # torch.topk changes its algorithm, and its choice, with the length
        assert stable_topk(torch.zeros(length), 5).tolist() == [0, 1, 2, 3, 4]
        assert stable_topk(torch.full((2, 3, length), -0.25), 3).tolist() == [[[0, 1, 2]] * 3] * 2


def test_topk_does_not_depend_on_what_follows() -> None:
    generator = torch.Generator().manual_seed(8)
    short = torch.randint(0, 3, (50, 17), generator=generator).float()
    for extra in (1, 30, 2000):
        longer = torch.cat((short, torch.full((50, extra), NOTHING)), dim=-1)
        assert torch.equal(stable_topk(short, 6), stable_topk(longer, 6))
        worse = torch.cat((short, torch.full((50, extra), -1.0)), dim=-1)
        assert torch.equal(stable_topk(short, 6), stable_topk(worse, 6))


def test_membership_marks_exactly_the_listed_positions() -> None:
    indices = torch.tensor([[0, 3, -1], [-1, -1, -1], [2, 3, 4]])
    expected = [[t in row for t in range(5)] for row in indices.tolist()]
    assert membership(indices, 5).tolist() == expected


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_a_position_is_visible_once_its_group_has_ended(ratio: int) -> None:
    # Group t holds tokens t*r .. t*r + r - 1; query s has seen tokens 0 .. s.
    expected = [[t * ratio + ratio - 1 <= s for t in range(4)] for s in range(11)]
    assert visible_positions(11, 4, ratio, torch.device("cpu")).tolist() == expected


# ------------------------------------------------------------------ candidate blocks


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_block_of_the_newest_visible_position_is_always_kept(ratio: int) -> None:
    positions = 11  # the last block has two of three positions
    queries = positions * ratio
    falling = torch.arange(positions, 0, -1.0).expand(1, queries, -1)
    seen = visible_positions(queries, positions, ratio, torch.device("cpu"))
    scores = falling.masked_fill(~seen, NOTHING)
    blocks = listed(select_blocks(scores, ratio, BLOCK, KEPT_BLOCKS))[0]
    for query, kept in enumerate(blocks):
        newest = (query + 1) // ratio - 1
        if newest < 0:
            assert kept == []
        else:
            # Block 0 has the best scores; the newest one has the worst of all.
            assert kept == sorted({0, newest // BLOCK})


def test_blocks_equal_a_loop_over_the_formula() -> None:
    generator = torch.Generator().manual_seed(9)
    scores = torch.randint(-4, 5, (2, 26, 13), generator=generator).float()
    groups = torch.arange(13) < torch.tensor([[13], [8]])
    seen = visible_positions(26, 13, 2, torch.device("cpu")) & groups.unsqueeze(1)
    scores = scores.masked_fill(~seen, NOTHING)
    expected = [[best_blocks(row, (query + 1) // 2 - 1) for query, row in enumerate(rows)] for rows in scores.tolist()]
    assert listed(select_blocks(scores, 2, BLOCK, KEPT_BLOCKS)) == expected


def test_scores_outside_the_candidates_are_removed() -> None:
    scores = random(1, 2, 8, seed=10)
    blocks = torch.tensor([[[0, 2], [1, -1]]])
    ours = mask_to_candidates(scores, blocks, BLOCK)
    for query, kept in enumerate(([0, 1, 2, 6, 7], [3, 4, 5])):
        for t in range(8):
            assert ours[0, query, t] == (scores[0, query, t] if t in kept else NOTHING)


# ------------------------------------------------------------------ the module


@torch.no_grad()
@pytest.mark.parametrize("candidates", [True, False], ids=["candidates", "free"])
@pytest.mark.parametrize(("ratio", "length"), [(1, 14), (2, 23)])
def test_selection_equals_a_loop_over_the_formula(
    tiny_config: MakeConfig, ratio: int, length: int, candidates: bool
) -> None:
    config = make_config(tiny_config, ratio, candidates)
    x, q_latent = random(2, length, HIDDEN, seed=11, dtype=WIDE), random(2, length, LATENT, seed=12, dtype=WIDE)
    positions = length // ratio
    latent = random(2, positions, 12, seed=13, dtype=WIDE)
    groups = torch.arange(positions) < torch.tensor([[positions], [positions - 3]])
    frequencies = layer_frequencies(config, True)
    table = exact_rotations(frequencies, torch.arange(length))
    source = make_indexer(config, 1).double()
    keys = source.keys(latent, exact_rotations(frequencies, torch.arange(positions) * ratio))
    assert torch.equal(keys, keys_by_hand(source, config, latent, ratio))
    blocks, pools = None, None
    restricted = 0
    for layer in (0, 1, 2, 4):
        indexer = source if layer == 1 else make_indexer(config, layer).double()
        by_hand = scores_by_hand(indexer, config, x, q_latent, keys, groups, ratio)
        scores = indexer.scores(*indexer.queries(x, q_latent, table), keys, groups)
        torch.testing.assert_close(scores, torch.tensor(by_hand, dtype=WIDE), rtol=1e-11, atol=1e-12)
        selection, blocks = indexer(x, q_latent, keys, table, groups, blocks)
        assert selection.shape == (2, length, min(TOPK, positions))
        free = [[best(row, TOPK) for row in rows] for rows in by_hand]
        if candidates and layer == 1:
            pools = [[best_blocks(row, (query + 1) // ratio - 1) for query, row in enumerate(rows)] for rows in by_hand]
        if not candidates or layer == 0:
            assert blocks is None
            assert listed(selection) == free
            continue
        assert blocks is not None
        assert pools is not None
        assert listed(blocks) == pools
        if layer == 1:  # the source itself chooses among all positions
            assert listed(selection) == free
            continue
        limited = [
            [
                best([score if t // BLOCK in pool else NOTHING for t, score in enumerate(row)], TOPK)
                for row, pool in zip(rows, row_pools, strict=True)
            ]
            for rows, row_pools in zip(by_hand, pools, strict=True)
        ]
        assert listed(selection) == limited
        restricted += limited != free
    assert restricted == (2 if candidates else 0)


@pytest.mark.parametrize("ratio", [1, 2])
def test_fewer_positions_than_topk_give_minus_one(tiny_config: MakeConfig, ratio: int) -> None:
    config = make_config(tiny_config, ratio, False)
    length = 6 * ratio
    indexer = make_indexer(config, 1)
    table = rotation_table(layer_frequencies(config, True), torch.arange(length))
    keys = random(1, 6, WIDTH, seed=14)
    groups = torch.tensor([[True, True, False, True, True, True]])
    selection, _ = indexer(
        random(1, length, HIDDEN, seed=15), random(1, length, LATENT, seed=16), keys, table, groups, None
    )
    for query, chosen in enumerate(listed(selection)[0]):
        visible = [t for t in range(6) if t < (query + 1) // ratio and t != 2]
        assert len(chosen) == min(TOPK, len(visible))
        assert set(chosen) <= set(visible)
    assert (selection[0, 0] == -1).sum() == (3 if ratio == 1 else 4)


def test_equal_scores_select_the_lowest_visible_positions(tiny_config: MakeConfig) -> None:
    config = make_config(tiny_config, 2, False)
    indexer = make_indexer(config, 1)
    with torch.no_grad():
        indexer.weights_proj.weight.zero_()
    table = rotation_table(layer_frequencies(config, True), torch.arange(24))
    x, q_latent = random(1, 24, HIDDEN, seed=17), random(1, 24, LATENT, seed=18)
    groups = torch.ones(1, 12, dtype=torch.bool)
    selection, _ = indexer(x, q_latent, random(1, 12, WIDTH, seed=19), table, groups, None)
    assert listed(selection)[0] == [list(range(min(TOPK, (query + 1) // 2))) for query in range(24)]


@torch.no_grad()
def test_bf16_scores_keep_the_roundings_of_bf16(tiny_config: MakeConfig) -> None:
    config = make_config(tiny_config, 1, False)
    indexer = make_indexer(config, 1).bfloat16()
    table = rotation_table(layer_frequencies(config, True), torch.arange(20))
    x, q_latent = random(1, 20, HIDDEN, seed=20).bfloat16(), random(1, 20, LATENT, seed=21).bfloat16()
    keys = fake_quantize(random(1, 20, WIDTH, seed=22).bfloat16(), "mxfp4")
    queries: list[Tensor] = []
    indexer.wq_b.register_forward_hook(lambda _m, _a, out: queries.append(out))
    ours = indexer.scores(*indexer.queries(x, q_latent, table), keys, torch.ones(1, 20, dtype=torch.bool))
    assert ours.dtype == torch.bfloat16
    frequencies = layer_frequencies(config, True).tolist()
    weights = (x.double() @ indexer.weights_proj.weight.double().T).bfloat16() * (WIDTH**-0.5 * HEADS**-0.5)
    same = visible = 0
    for s in range(20):
        raw = queries[0][0, s].view(HEADS, WIDTH)
        q = fake_quantize(torch.cat((raw[:, :-ROPE], turn(raw, s, frequencies)[:, -ROPE:].bfloat16()), -1), "mxfp4")
        for t in range(s + 1):
            products = (q.double() @ keys[0, t].double()).bfloat16().relu()
            score = (products * weights[0, s]).double().sum().bfloat16()
            same += bool(score == ours[0, s, t])
            visible += 1
            assert float(score) == pytest.approx(float(ours[0, s, t]), rel=0.02, abs=0.02)
    # A rotation on the edge of two bf16 numbers may fall to the other side and move one query's scores.
    assert same > 0.9 * visible


# ------------------------------------------------------------------ in attention and model


def attend(module: DeepseekV41Attention, x: Tensor, length: Tensor | None = None) -> AttentionState:
    batch, size = x.shape[:2]
    live = torch.ones(batch, size, dtype=torch.bool) if length is None else torch.arange(size) < length.unsqueeze(-1)
    return module(x, AttentionState(), torch.arange(size).expand(batch, -1), live)[1]


def make_attention(config: Any, layer: int, seed: int = 0) -> DeepseekV41Attention:
    torch.manual_seed(seed)
    return DeepseekV41Attention(config, layer, BackendConfig())


@torch.no_grad()
@pytest.mark.parametrize("ratio", [1, 2])
def test_index_keys_read_the_latent_before_its_rotation_and_rounding(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, ratio: int
) -> None:
    monkeypatch.setattr("dsv41.attention.rotation_table", exact_rotations)
    config = make_config(tiny_config, ratio, True)
    module = make_attention(config, 1).double()
    assert module.compressor is not None
    assert module.indexer is not None
    x = random(2, 15, HIDDEN, seed=29, dtype=WIDE)
    state = attend(module, x)
    assert state.index_keys is not None
    assert state.compressed_kv is not None
    expected = keys_by_hand(module.indexer, config, module.compressor(x), ratio)
    torch.testing.assert_close(state.index_keys, expected, atol=1e-13, rtol=1e-12)
    rotated = keys_by_hand(module.indexer, config, state.compressed_kv, ratio)
    assert (state.index_keys - rotated).abs().max() > 0.1


def without_absent(rows: Tensor) -> list[list[list[int]]]:
    return [[[index for index in row if index >= 0] for row in batch] for batch in rows.tolist()]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("equal_scores", [False, True])
def test_selection_and_candidates_do_not_see_the_future(
    tiny_config: MakeConfig, ratio: int, equal_scores: bool
) -> None:
    module = make_attention(make_config(tiny_config, ratio, True), 1).double()
    assert module.indexer is not None
    if equal_scores:
        with torch.no_grad():
            module.indexer.weights_proj.weight.zero_()
    x = random(2, 27, HIDDEN, seed=23, dtype=WIDE)
    whole = attend(module, x)
    assert whole.selection is not None
    assert whole.candidate_blocks is not None
    for cut in (5, 12, 18):
        changed = x.clone()
        changed[:, cut:] = random(2, 27 - cut, HIDDEN, seed=24, dtype=WIDE) * 5
        for other in (attend(module, changed), attend(module, x[:, :cut])):
            assert other.selection is not None
            assert other.candidate_blocks is not None
            assert without_absent(other.selection[:, :cut]) == without_absent(whole.selection[:, :cut])
            assert without_absent(other.candidate_blocks[:, :cut]) == without_absent(whole.candidate_blocks[:, :cut])
        later = attend(module, changed).selection
        assert later is not None
        if not equal_scores:
            assert not torch.equal(later[:, cut:], whole.selection[:, cut:])


def test_selection_differs_from_query_to_query_and_row_to_row(tiny_config: MakeConfig) -> None:
    selection = attend(make_attention(make_config(tiny_config, 1, False), 1), random(2, 24, HIDDEN, seed=25)).selection
    assert selection is not None
    late = listed(selection)[0][16:]
    assert len({tuple(chosen) for chosen in late}) > 4
    assert not torch.equal(selection[0], selection[1])
    # More than the newest or the oldest ones: otherwise a fixed pattern would pass for a selection.
    assert any(chosen[-1] - chosen[0] >= TOPK for chosen in late)


@pytest.mark.parametrize("ratio", [1, 2])
def test_groups_with_padding_are_never_selected_and_change_nothing(tiny_config: MakeConfig, ratio: int) -> None:
    module = make_attention(make_config(tiny_config, ratio, True), 1).double()
    x = random(2, 20, HIDDEN, seed=26, dtype=WIDE)
    lengths = torch.tensor([20, 13])
    padded = attend(module, x, lengths)
    alone = attend(module, x[1:, :13])
    assert padded.selection is not None
    assert padded.candidate_blocks is not None
    assert alone.selection is not None
    assert alone.candidate_blocks is not None
    assert padded.selection[1].max() < 13 // ratio
    assert without_absent(padded.selection[1:, :13]) == without_absent(alone.selection)
    assert without_absent(padded.candidate_blocks[1:, :13]) == without_absent(alone.candidate_blocks)
    assert attend(module, x).selection[1].max() >= 13 // ratio  # type: ignore[index]


def test_no_gradient_reaches_the_indexer(tiny_config: MakeConfig) -> None:
    config = make_config(tiny_config, 2, True)
    modules = [make_attention(config, layer, seed=layer) for layer in range(5)]
    x = random(2, 20, HIDDEN, seed=27).requires_grad_()
    state, total = AttentionState(), torch.zeros(())
    for module in modules:
        out, state = module(x, state, torch.arange(20).expand(2, -1), torch.ones(2, 20, dtype=torch.bool))
        total = total + out.square().sum()
        assert state.index_keys is not None
        assert not state.index_keys.requires_grad
    total.backward()
    for module in modules:
        for name, parameter in module.named_parameters():
            if name.startswith("indexer."):
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None, name
                assert parameter.grad.any(), name


def run_model(model: DeepseekV41ForCausalLM) -> tuple[dict[int, AttentionState], dict[int, Tensor]]:
    """State after each layer, and the mask that each layer's attention core was given, of a padded batch."""
    states: dict[int, AttentionState] = {}
    masks: dict[int, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        block.attn.register_forward_hook(lambda _m, _a, out, layer=layer: states.__setitem__(layer, out[1]))
    eager = dense_attention.MASKED_ATTENTION["eager"]

    def core(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
        masks[len(masks)] = mask
        return eager(q, kv, mask, sink)

    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(28))
    attention_mask = (torch.arange(40) < torch.tensor([[40], [31]])).long()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(dense_attention.MASKED_ATTENTION, "eager", core)
        model(ids, attention_mask=attention_mask)
    return states, masks


def test_reuse_layers_take_the_selection_of_their_source(golden_model: MakeModel) -> None:
    model = golden_model(backend=BackendConfig(attn="eager"))
    config = model.config.text_config
    states, masks = run_model(model)
    live = torch.arange(40) < torch.tensor([[40], [31]])
    for layer in range(1, 6):
        source = states[max(s for s in config.index_source_layer_ids if s <= layer)]
        keys = states[max(s for s in config.kv_source_layer_ids if s <= layer)]
        mine = states[layer]
        assert mine.selection is source.selection
        assert mine.compressed_kv is keys.compressed_kv
        assert mine.index_keys is keys.index_keys
        assert mine.group_mask is keys.group_mask
        assert source.selection is not None
        chosen = masks[layer][..., 40:]
        for b in range(2):
            for s in range(40):
                expected = [t for t in source.selection[b, s].tolist() if t >= 0] if live[b, s] else []
                assert chosen[b, s].nonzero().flatten().tolist() == expected
    assert states[2].selection is states[1].selection  # layer 2 is the Reuse layer
    for layer in (3, 5):
        assert not torch.equal(states[layer].selection, states[layer - 1].selection)  # type: ignore[arg-type]


def test_reindex_layers_stay_within_the_candidates(golden_model: MakeModel) -> None:
    limited, _ = run_model(golden_model(backend=BackendConfig(attn="eager"), candidate_topk_blocks=3))
    free, _ = run_model(golden_model(backend=BackendConfig(attn="eager"), candidate_source_layer_id=-1))
    pool = limited[4].candidate_blocks
    assert pool is not None
    assert limited[5].candidate_blocks is pool
    assert limited[3].candidate_blocks is None
    assert free[5].candidate_blocks is None

    def escapes(selection: Tensor | None) -> int:
        assert selection is not None
        count = 0
        for b in range(2):
            for s in range(40):
                blocks = {block for block in pool[b, s].tolist() if block >= 0}
                count += sum(t // 2 not in blocks for t in selection[b, s].tolist() if t >= 0)
        return count

    assert escapes(limited[5].selection) == 0
    assert escapes(free[5].selection) > 50
    assert escapes(limited[4].selection) > 0  # the source itself is not limited
    assert torch.equal(limited[4].selection, free[4].selection)  # type: ignore[arg-type]
    assert limited[5].selection is not None
    # Three blocks of two positions, of which the query's own holds one or two visible ones: all are selected.
    counts = (limited[5].selection[0] >= 0).sum(-1).tolist()
    assert counts == [min(query + 1, 6 if query % 2 else 5) for query in range(40)]


# ------------------------------------------------------------------ chunks


def select(indexer: Indexer, length: int, blocks: Tensor | None, seed: int) -> tuple[Tensor, Tensor | None]:
    """The selection for two random rows, the second with padding."""
    generator = torch.Generator().manual_seed(seed)
    positions = length // indexer.ratio
    x = torch.randn(2, length, indexer.weights_proj.in_features, generator=generator).double()
    q_latent = torch.randn(2, length, indexer.wq_b.in_features, generator=generator).double()
    keys = torch.randn(2, positions, indexer.width, generator=generator).double()
    table = torch.polar(torch.ones(length, 4), torch.rand(length, 4, generator=generator))
    groups = torch.arange(positions) < torch.tensor([[positions], [positions * 3 // 4]])
    return indexer(x, q_latent, keys, table, groups, blocks)


@pytest.mark.parametrize("layer", [1, 4, 5], ids=["full", "candidate source", "obeys candidates"])
def test_chunks_and_gathering_select_the_same(
    tiny_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    config = tiny_config(candidate_topk_blocks=3, candidate_block_size=4, index_topk=7).text_config
    torch.manual_seed(5)
    source, indexer = Indexer(config, 4).double(), Indexer(config, layer).double()
    for parameter in (*source.parameters(), *indexer.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    length = 90
    _, blocks = select(source, length, None, seed=1)
    assert blocks is not None
    gathered = 0

    def counted(*args: Any) -> Tensor:
        nonlocal gathered
        gathered += 1
        return inside(*args)

    inside = indexer.select_inside
    monkeypatch.setattr(indexer, "select_inside", counted)
    results = []
    for chunk_bytes, cost in ((1 << 30, 10**6), (1, 10**6), (1, 0), (1 << 30, 0)):
        monkeypatch.setattr("dsv41.indexer.CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr("dsv41.indexer.GATHER_COST", cost)
        results.append(select(indexer, length, blocks if layer == 5 else None, seed=2))
    assert bool(gathered) == (layer == 5), "only a layer with candidates gathers, and it has"
    for selection, kept in results[1:]:
        assert torch.equal(selection, results[0][0])
        assert (kept is None) == (results[0][1] is None)
        assert kept is None or torch.equal(kept, results[0][1])
