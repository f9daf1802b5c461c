"""Parameters and floating-point operations of a model, by part: the former from parameter names, the latter from the
configuration.

The count covers the function, 2 per multiply-add: every product that sums over channels, keys, streams or heads,
and the outer products with which a site or a memory writes into the streams. Each query counts the positions that it
sees or has selected, early ones fewer. Not counted are elementwise operations: norms, softmax and other
activations, Sinkhorn, rotation, quantisation, the sums per channel of pooling, top-k, look-ups, losses.

The backward of a product is two products of its size, one per input. A frozen indexer has none; a learned one has
gradients of its weights, not of its detached inputs, and of its scores at the selected positions alone
(`ops/divergence.py`). Frozen weights apart from the indexer are counted as if they were trained.

Work of an implementation beyond the function is not counted, since model FLOPs utilisation must not credit it:
recomputation in backward (activations, and the logits of `ops/sparse_attention.py`), keys that are scored and masked
away, blocks of keys shared by several queries, experts that no token has chosen.

Shapes: S positions of a sequence, T compressed positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.schedule import layer_plan, layer_plans

# First match wins, so a part stands before the one that contains it.
PARTS = (
    ("embedding", ".embed_tokens."),
    ("head", "lm_head."),
    ("indexer", ".indexer."),
    ("attention", ".attn."),
    ("mHC", "_hc."),
    ("router", ".ffn.gate."),
    ("routed experts", ".ffn.experts."),
    ("shared experts", ".ffn.shared_experts."),
    ("Engram tables", ".engram.embed."),
    ("Engram gates", ".engram."),
    ("norms", "norm."),
)


def part_of(name: str) -> str:
    """Part that a parameter of `DeepseekV41ForCausalLM` belongs to, by its name; "other" if to none."""
    return next((part for part, mark in PARTS if mark in name), "other")


# Parts with a curve each; all others are "rest".
WATCHED_PARTS = {"Engram tables": "engram_tables", "mHC": "mhc", "indexer": "indexer", "router": "router"}


def watched_part(name: str) -> str:
    """Part under which a parameter's gradient and update are logged: one of `WATCHED_PARTS`' values, or "rest"."""
    return WATCHED_PARTS.get(part_of(name), "rest")


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Number of parameters of each part that has any, in a fixed order. Works on the meta device."""
    counts = dict.fromkeys([*(part for part, _ in PARTS), "other"], 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a set of products.

    Attributes:
        forward: Operations in forward.
        backward: Operations in backward, without recomputation.
    """

    forward: int = 0
    backward: int = 0

    @property
    def training(self) -> int:
        """Operations in forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def scored_positions(config: DeepseekV41TextConfig, layer: int, length: int) -> np.ndarray:
    """Compressed positions that an index source has to score, for each query: int64 [S].

    All visible ones; behind a candidate source those of the pool, in which only the newest block may be incomplete.

    Args:
        config: Uses compress_ratios, candidate_*.
        layer: A layer with a compression ratio.
        length: S.
    """
    visible = np.arange(1, length + 1) // config.compress_ratios[layer]
    size, kept = config.candidate_block_size, config.candidate_topk_blocks
    if not layer_plan(config, layer).obeys_candidates:
        return visible
    newest = visible - (-(-visible // size) - 1) * size
    return np.where(visible > kept * size, (kept - 1) * size + newest, visible)


def flops_per_sequence(config: DeepseekV41TextConfig, length: int) -> dict[str, Flops]:
    """Operations for one sequence without padding, counted as described at the top of this file.

    A token costs more in a longer sequence: divide by `length` for the mean. Takes a few milliseconds, and tenths of a
    second for a million positions.

    Args:
        config: With `vocab_size` filled in.
        length: Positions S, at least 1 and at most `max_position_embeddings`.

    Returns:
        Operations of each part that the model has. Every name begins with one of `dsv41.cost.PARTS`, whose
        attention and indexer are divided: "attention projections" and "attention compressors" (the compressors) have
        weights, "attention keys" (logits and weighted sums) and "indexer scores" grow with the positions seen.

    Raises:
        ValueError: `vocab_size` is unset, or `length` out of range.
    """
    if config.vocab_size is None:
        raise ValueError("vocab_size: unset; give a number, or take the configuration of a model that has a tokenizer")
    if not 1 <= length <= config.max_position_embeddings:
        raise ValueError(
            f"length: must lie in 1..{config.max_position_embeddings} (max_position_embeddings), got {length}"
        )
    hidden, streams, heads, width = config.hidden_size, config.hc_mult, config.num_attention_heads, config.head_dim
    latent, index_heads, index_width = config.q_lora_rank, config.index_n_heads, config.index_head_dim
    expert = 3 * hidden * config.moe_intermediate_size
    engrams = len(config.active_engram_layer_ids)
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads

    keys = 0 if config.engram_gate == "open" else streams

    # Multiply-adds of all positions; attention and indexer follow layer by layer.
    blocks = length * config.num_hidden_layers
    mixing = (2 + streams) * streams * hidden  # of a site: collapse, comb, post; predicting them costs C times that
    sums = {
        "attention projections": blocks
        * (
            hidden * (latent + width)
            + latent * heads * width
            + heads * width * config.o_lora_rank
            + config.o_groups * config.o_lora_rank * hidden
        ),
        "attention compressors": 0,
        "attention keys": 0,
        "indexer projections": 0,
        "indexer scores": 0,
        "mHC": 0 if config.residual == "plain" else blocks * 2 * (streams + 1) * mixing + length * streams * hidden,
        "router": blocks * hidden * config.n_routed_experts,
        "routed experts": blocks * expert * config.num_experts_per_tok,
        "shared experts": blocks * expert * config.n_shared_experts,
        "Engram gates": length * engrams * hidden * (columns * config.engram_head_dim * (keys + 1) + 2 * keys),
        "head": length * hidden * config.vocab_size,
    }
    longest = length if config.attention == "full" else config.sliding_window
    window = int(np.minimum(np.arange(1, length + 1), longest).sum())
    per_score = index_heads * (index_width + 1)
    scores_taught, selected = 0, 0
    for plan in layer_plans(config):
        ratio = plan.ratio
        if plan.selects:
            scored = scored_positions(config, plan.layer, length)
            selected = int(np.minimum(scored, config.index_topk).sum())  # until another source selects
            sums["indexer projections"] += length * index_heads * (latent * index_width + hidden)
            sums["indexer scores"] += int(scored.sum()) * per_score
            scores_taught += selected * per_score
        if plan.makes_keys:
            groups = length // ratio
            sums["attention compressors"] += hidden * width * (length if ratio == 1 else 2 * groups * ratio)
            sums["indexer projections"] += groups * width * index_width
        sums["attention keys"] += 2 * heads * width * (window + (selected if ratio else 0))
    flops = {part: Flops(2 * count, 4 * count) for part, count in sums.items() if count}
    learned = config.indexer == "learned"
    for part, taught in (("indexer projections", sums["indexer projections"]), ("indexer scores", 2 * scores_taught)):
        if part in flops:
            flops[part] = Flops(flops[part].forward, 2 * taught if learned else 0)
    return flops
