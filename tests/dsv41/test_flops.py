"""Operations against torch's own counter, and against what a model really selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dsv41 import BackendConfig, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.cost import PARTS, Flops, flops_per_sequence

# Every product is executed once, apart from keys that are masked away.
PLAIN = BackendConfig(attn="eager", experts="loop", loss="full")
VARIANTS: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "no candidates": {"candidate_source_layer_id": -1},
    "candidate source and an Engram cut off": {"num_hidden_layers": 3},
    "window alone after a selection": {"compress_ratios": [0, 2, 2, 0, 1, 1], "index_source_layer_ids": [1, 4, 5]},
    "window alone": {
        "compress_ratios": [0] * 6,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    },
    "no Engram": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "window by switch": {"attention": "window"},
    "full attention": {"attention": "full"},
    "plain residual": {"residual": "plain", "hc_mult": 1},
    "hyper-connections": {"residual": "hyper_connections"},
    "open gate": {"engram_gate": "open"},
}
ROOT = "DeepseekV41ForCausalLM"


def addmm_in_place(base: Any, a: list[int], b: list[int], **_: Any) -> int:
    """Shapes to operations, for a product that torch's counter does not know; it does know `addmm`."""
    return 2 * a[0] * a[1] * b[1]


def run(model: DeepseekV41ForCausalLM, length: int) -> tuple[dict[str, int], int, int]:
    """What torch counts in forward, by module; in forward; and in backward, where it loses track of modules."""
    ids = torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(length))
    mapping = {torch.ops.aten.addmm_: addmm_in_place}
    forward, backward = (FlopCounterMode(display=False, depth=None, custom_mapping=mapping) for _ in range(2))
    with forward:
        loss = model(ids, labels=ids).loss
    with backward:
        loss.backward()
    table = {name: sum(counts.values()) for name, counts in forward.get_flop_counts().items()}
    return table, forward.get_total_flops(), backward.get_total_flops()


def watch_states(model: DeepseekV41ForCausalLM) -> list[AttentionState]:
    """The state that each layer's attention hands on, in the forward to come."""
    states: list[AttentionState] = []
    for module in model.modules():
        if isinstance(module, DeepseekV41Attention):
            module.register_forward_hook(lambda _, __, out: states.append(out[1]))
    return states


def executed_keys(config: DeepseekV41TextConfig, length: int) -> int:
    """Multiply-adds of logits and weighted sums where every query is multiplied with every key."""
    ratios = config.compress_ratios[: len(config.layers)] if config.attention == "csa2" else [0] * len(config.layers)
    lengths = [length + (length // ratio if ratio else 0) for ratio in ratios]
    return 2 * config.num_attention_heads * config.head_dim * length * sum(lengths)


def unseen(config: DeepseekV41TextConfig, length: int) -> tuple[int, int]:
    """Operations that the model does element by element, where torch counts none: in forward, in backward."""
    streams = 2 * length * config.hc_mult * config.hidden_size
    mixed = config.residual != "plain"
    sites = 2 * config.num_hidden_layers * streams * mixed  # post * y in forward, pre * d_x in backward
    gates = 2 * len(config.active_engram_layer_ids) * streams * (config.engram_gate == "learned")
    first = streams * mixed  # the first site reads with constants, which have no gradient
    return sites + gates, sites + 2 * gates + first


def part_sums(model: DeepseekV41ForCausalLM, table: dict[str, int]) -> dict[str, int]:
    """Torch's table by part, without scores and keys; what a block does itself is the writing of its sites."""

    def of(*names: str) -> int:
        return sum(table.get(f"{ROOT}.{name}", 0) for name in names)

    sums = dict.fromkeys(("compressors", "indexer", "projections", "router", "routed", "shared", "Engram", "mHC"), 0)
    for layer in model.config.text_config.layers:
        block = f"model.layers.{layer}"
        attn, ffn = f"{block}.attn", f"{block}.ffn"
        index = of(*(f"{attn}.indexer.{name}" for name in ("wq_b", "weights_proj", "wk")))
        sums["indexer"] += index
        sums["compressors"] += of(f"{attn}.compressor")
        keys_are_inside = of(f"{attn}.indexer.wk")  # made before the indexer's forward, so not counted in it
        inner = of(f"{attn}.indexer", f"{attn}.compressor", f"{attn}.core") + keys_are_inside
        sums["projections"] += of(attn) - inner
        sums["router"] += of(f"{ffn}.gate")
        sums["routed"] += of(f"{ffn}.experts")
        sums["shared"] += of(f"{ffn}.shared_experts")
        sums["Engram"] += of(f"{block}.engram")
        sums["mHC"] += of(block) - of(attn, ffn, f"{block}.engram")
    sums["mHC"] += of("model") - sum(of(f"model.layers.{layer}") for layer in model.config.text_config.layers)
    return sums | {"head": table[ROOT] - of("model")}


@pytest.mark.parametrize(("variant", "length"), [("every kind of layer", 64), *((name, 61) for name in VARIANTS)])
def test_parts_and_whole_are_what_torch_counts(
    tiny_model: Callable[..., DeepseekV41ForCausalLM], variant: str, length: int
) -> None:
    """Exactly, once masked keys are taken out and products that are no matrix product are put in."""
    model = tiny_model(PLAIN, **VARIANTS[variant])
    config = model.config.text_config
    found = flops_per_sequence(config, length)
    table, forward, backward = run(model, length)

    by_name = {name: flops.forward for name, flops in found.items()}
    gated, mixed = config.engram_gate == "learned", config.residual != "plain"
    engram = 4 * length * len(config.active_engram_layer_ids) * config.hc_mult * config.hidden_size * gated
    writes = 4 * length * config.num_hidden_layers * config.hc_mult * config.hidden_size * mixed
    # A plain stream is read through the same product as mixed ones at the very end, which it does not need.
    collapse = 0 if mixed else 2 * length * config.hidden_size
    assert part_sums(model, table) == {
        "projections": by_name["attention projections"],
        "compressors": by_name.get("attention compressors", 0),
        "indexer": by_name.get("indexer projections", 0),
        "router": by_name["router"],
        "routed": by_name["routed experts"],
        "shared": by_name["shared experts"],
        "Engram": by_name.get("Engram gates", 0) - engram,
        "mHC": by_name.get("mHC", 0) - writes + collapse,
        "head": by_name["head"],
    }

    # Scores have no backward here, so their forward alone is exchanged.
    attn = [f"{ROOT}.model.layers.{layer}.attn" for layer in config.layers]
    scores = sum(
        table.get(f"{name}.indexer", 0) - sum(table.get(f"{name}.indexer.{p}", 0) for p in ("wq_b", "weights_proj"))
        for name in attn
    )
    masked = 2 * executed_keys(config, length) - found["attention keys"].forward
    extra = scores - by_name.get("indexer scores", 0)
    total = sum(found.values(), Flops())
    missed, missed_backward = unseen(config, length)
    assert forward == total.forward + masked + extra - missed + collapse
    assert backward == total.backward + 2 * masked - missed_backward + collapse
    assert missed / total.forward < 0.02
    assert missed_backward / total.backward < 0.02


@pytest.mark.parametrize(
    ("variant", "length"),
    [
        ("every kind of layer", 61),
        ("every kind of layer", 5),
        ("no candidates", 64),
        ("window alone after a selection", 33),
    ],
)
def test_keys_and_scores_are_those_of_the_model(
    tiny_model: Callable[..., DeepseekV41ForCausalLM], variant: str, length: int
) -> None:
    """What each query of a real forward has selected, and what it could select from."""
    model = tiny_model(PLAIN, **VARIANTS[variant])
    config = model.config.text_config
    states = watch_states(model)
    with torch.no_grad():
        model(torch.randint(3, 500, (1, length), generator=torch.Generator().manual_seed(length)))
    keys, scores, taught = 0, 0, 0
    for layer, state in enumerate(states):
        ratio = config.compress_ratios[layer]
        for query in range(length):
            keys += min(query + 1, config.sliding_window)
            if not ratio:
                continue
            assert state.selection is not None
            chosen = int((state.selection[0, query] >= 0).sum())
            keys += chosen
            if layer in config.index_source_layer_ids:
                taught += chosen
                pool = range((query + 1) // ratio)
                if 0 <= config.candidate_source_layer_id < layer:
                    assert state.candidate_blocks is not None
                    blocks = state.candidate_blocks[0, query].tolist()
                    pool = [position for position in pool if position // config.candidate_block_size in blocks]
                scores += len(pool)
    found = flops_per_sequence(config, length)
    per_key, per_score = 4 * config.num_attention_heads * config.head_dim, 2 * config.index_n_heads
    assert found["attention keys"] == Flops(keys * per_key, 2 * keys * per_key)
    per_score *= config.index_head_dim + 1
    assert found.get("indexer scores", Flops()) == Flops(scores * per_score, 0)
    config.indexer = "learned"
    learned = flops_per_sequence(config, length)
    assert learned.get("indexer scores", Flops()) == Flops(scores * per_score, 2 * taught * per_score)
    assert found["indexer projections"].backward == 0
    assert learned["indexer projections"].backward == found["indexer projections"].forward
    assert {n: f for n, f in learned.items() if "index" not in n} == {
        n: f for n, f in found.items() if "index" not in n
    }


def test_names_begin_with_those_of_the_parameters_parts() -> None:
    """So that both can stand in one table; embedding, norms and Engram tables cost no products."""
    names = list(flops_per_sequence(DeepseekV41TextConfig(), 4096))
    parts = [next(part for part, _ in PARTS if name.startswith(part)) for name in names]
    assert {part for part, _ in PARTS} - set(parts) == {"embedding", "norms", "Engram tables"}


def test_the_release_needs_no_model() -> None:
    """Per token at its longest sequence: experts as on paper, keys by a sum that is written out."""
    config = DeepseekV41TextConfig()
    length = config.max_position_embeddings
    found = flops_per_sequence(config, length)
    assert found["routed experts"].forward == length * 2 * 40 * 6 * 3 * 5120 * 2304
    assert found["head"].training == length * 6 * 5120 * 129280
    short = flops_per_sequence(config, 2000)
    window = sum(min(n, 128) for n in range(1, 2001))
    halves, ones = (sum(min(n // ratio, 512) for n in range(1, 2001)) for ratio in (2, 1))
    assert short["attention keys"].forward == 4 * 64 * 512 * (40 * window + 18 * halves + 20 * ones)
    # The pool of 2048 blocks of 8 limits the scores of five later sources, whose newest block is not always full.
    pool = sum(n if n <= 16384 else 16376 + (n - 1) % 8 + 1 for n in range(1, 20001))
    every = sum(range(1, 20001))
    halved = sum(n // 2 for n in range(1, 20001))
    scores = flops_per_sequence(config, 20000)["indexer scores"].forward
    assert scores == 2 * 32 * 129 * (3 * halved + every + 4 * pool)


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"vocab_size": None}, 8, "vocab_size: unset"),
        ({}, 0, "length: must lie in 1..1048576 .max_position_embeddings., got 0"),
        ({}, 1048577, "length: must lie in 1..1048576"),
    ],
)
def test_what_cannot_be_counted_is_refused(fields: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        flops_per_sequence(DeepseekV41TextConfig(**fields), length)
