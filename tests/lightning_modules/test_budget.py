"""Savings of sharing and selecting, against counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv41 import DeepseekV41TextConfig
from lightning_modules.budget import Saving, named_parameters, saving, savings, savings_table, without_sharing

CONFIGS = Path(__file__).parents[2] / "configs"


def make_config(**changes: Any) -> DeepseekV41TextConfig:
    """Layers: 0 window; ratio 2: 1 Full, 2 Reuse, 3 Reindex; ratio 1: 4 Full, with the pool, 5 Reindex."""
    raw = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())["model"]["config"]
    raw |= {"vocab_size": 100, "engram_layer_ids": [], "engram_num_embeddings": None}
    raw |= {"sliding_window": 4, "index_topk": 5, "candidate_topk_blocks": 2, "candidate_block_size": 4}
    return DeepseekV41TextConfig(**raw | changes)


def test_savings_equal_counts_by_hand() -> None:
    config = make_config()
    shared, own, dense = savings(config, [3, 21])
    # head_dim and index_head_dim are 32: FP8 takes 32 bytes and a scale; FP4 keys 16 bytes and two scales; FP4 index
    # keys 16 bytes and a scale.
    raw, position = 33, 18 + 17
    # Positions of ratio 2 and 1 after 21 tokens: 10 and 21. Windows hold 4 tokens.
    assert shared.cache_bytes == {3: 6 * 3 * raw + (1 + 3) * position, 21: 6 * 4 * raw + (10 + 21) * position}
    assert own.cache_bytes == {3: 6 * 3 * raw + (3 + 6) * position, 21: 6 * 4 * raw + (3 * 10 + 2 * 21) * position}
    assert dense.cache_bytes == {3: 6 * 3 * raw, 21: 6 * 21 * raw}
    assert shared.token_bytes == 1.5 * position
    assert own.token_bytes == 3.5 * position
    assert dense.token_bytes == 6 * raw
    # Query 21 scores 10 positions in layers 1 and 3, 21 in layer 4; in layer 5 the newest block, which has one
    # position so far, and one whole block of four.
    assert shared.keys_scored == {3: 1 + 1 + 3 + 3, 21: 10 + 10 + 21 + 5}
    assert own.keys_scored == {3: 1 + 1 + 1 + 3 + 3, 21: 10 + 10 + 10 + 21 + 5}
    assert dense.keys_scored == {3: 0, 21: 0}
    assert shared.keys_read == {3: 6 * 3 + 3 * 1 + 2 * 3, 21: 6 * 4 + 5 * 5}
    assert own.keys_read == shared.keys_read
    assert dense.keys_read == {3: 18, 21: 126}
    # An owner of keys has a compressor, two matrices of 128 x 32 with ratio 2, one with ratio 1, and a norm. An indexer
    # has queries, 64 x 4 x 32, and weights, 128 x 4; and a matrix 32 x 32 and a norm where it makes keys.
    pooled, plain, queries, keys = 2 * 128 * 32 + 32, 128 * 32 + 32, 64 * 128 + 128 * 4, 32 * 32 + 32
    assert own.parameters - shared.parameters == 2 * pooled + plain + queries + 3 * keys
    assert shared.parameters - dense.parameters == pooled + plain + 4 * queries + 2 * keys
    for one in (shared, own, dense):
        assert one.parameters - one.attention_parameters == shared.parameters - shared.attention_parameters
    assert shared.parameters == sum(parameter.numel() for parameter in named_parameters(config).values())
    # Six operations for each weight and token, but four for an indexer that learns, whose inputs have no gradient.
    # Layers 2 and 3 pool the 20 tokens of whole groups with two matrices, layer 5 all 21 with one.
    groups = 6 * (2 * 2 * 20 * 128 * 32 + 21 * 128 * 32)
    projected = 4 * (21 * queries + (2 * 10 + 21) * 32 * 32)
    # Layer 2 scores what it sees, and learns from what it has selected.
    per_score = 4 * 33
    visible = [(s + 1) // 2 for s in range(21)]
    scores = 2 * sum(visible) * per_score + 4 * sum(min(seen, 5) for seen in visible) * per_score
    assert (own.flops[21] - shared.flops[21]) * 21 == pytest.approx(groups + projected + scores)


def test_a_position_of_odd_width_has_a_whole_byte_and_a_scale_for_its_last_group() -> None:
    one = saving("odd", make_config(head_dim=34, index_head_dim=33), [8])
    raw, compressed, index = 34 + 2, 17 + 3, 17 + 2
    assert one.cache_bytes == {8: 6 * 4 * raw + (4 + 8) * (compressed + index)}


def test_without_sharing_is_the_overlay() -> None:
    tiny = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())["model"]["config"]
    overlay = yaml.safe_load((CONFIGS / "overlays" / "no_sharing.yaml").read_text())["model"]["config"]
    assert without_sharing(DeepseekV41TextConfig(**tiny)).fields() == DeepseekV41TextConfig(**tiny | overlay).fields()
    release = without_sharing(DeepseekV41TextConfig())
    assert release.kv_source_layer_ids == release.index_source_layer_ids == list(range(2, 40))
    # A prefix of a model may keep a candidate source that lies beyond it.
    prefix = without_sharing(DeepseekV41TextConfig(**tiny | {"num_hidden_layers": 3}))
    assert prefix.kv_source_layer_ids == [1, 2, 3, 4, 5]


def test_what_has_no_formats_or_nothing_to_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^quantized_caches: must be true"):
        savings(make_config(quantized_caches=False), [8])
    with pytest.raises(ValueError, match=r"^attention: must be 'csa2' to share anything, got 'window'$"):
        savings(make_config(attention="window"), [8])
    with pytest.raises(ValueError, match=r"^length: must lie in 1\.\.1024"):
        savings(make_config(), [1025])


def test_the_table_of_savings_has_a_column_for_each() -> None:
    rows = [
        Saving("one", 5_000_000, 2_000, {8: 1e6, 64: 2e6}, 52.5, {8: 900, 64: 1000}, {8: 24, 64: 1024}, {8: 7, 64: 9}),
        Saving("two", 6_000_000, 3_000, {8: 3e6, 64: 4e6}, 198, {8: 90, 64: 12_000}, {8: 48, 64: 2048}, {8: 0, 64: 1}),
    ]
    assert savings_table(rows).splitlines() == [
        "|  | one | two |",
        "|---|---:|---:|",
        "| parameters | 5.0 M | 6.0 M |",
        "| parameters of attention and indexers | 2.0 k | 3.0 k |",
        "| training FLOPs per token, 8 tokens | 1.0 M | 3.0 M |",
        "| training FLOPs per token, 64 tokens | 2.0 M | 4.0 M |",
        "| bytes that a token adds to a cache | 52 | 198 |",
        "| cache of 8 tokens | 900 B | 90 B |",
        "| cache of 64 tokens | 1.0 kB | 12.0 kB |",
        "| keys read by query 8 | 24 | 48 |",
        "| index keys scored by query 8 | 7 | 0 |",
        "| keys read by query 64 | 1,024 | 2,048 |",
        "| index keys scored by query 64 | 9 | 1 |",
    ]
