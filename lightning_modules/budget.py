"""Cost of a configuration: parameters, operations and bytes, without building it.

Shapes are those of the real modules, built on the meta device, so the counts are exact. Bytes are those of a rank of
`EngramFSDPStrategy`, which holds its rows of everything: fp32 weights and gradients, and the optimizer's state. What a
forward keeps for backward is not counted: it grows with batch and length, and with what is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41TextConfig
from dsv41.cost import flops_per_sequence, part_of, scored_positions
from dsv41.model import DeepseekV41Block
from dsv41.ranks import owned_rows
from dsv41.schedule import layer_plans
from lightning_modules.optim.groups import OptimizerConfig, group_of
from lightning_modules.text import markdown_table, readable_count, readable_size

FP32 = 4


def named_parameters(config: DeepseekV41TextConfig) -> dict[str, nn.Parameter]:
    """All parameters of `DeepseekV41ForCausalLM` by name, on the meta device; no tokenizer is needed.

    Raises:
        ValueError: `vocab_size` is unset.
    """
    if config.vocab_size is None:
        raise ValueError("model.config.vocab_size: unset, and no tokenizer says it; give a number")
    with torch.device("meta"):
        outer = nn.Module()
        outer.model = nn.Module()
        outer.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        outer.model.layers = nn.ModuleList(DeepseekV41Block(config, layer, BackendConfig()) for layer in config.layers)
        outer.model.norm = nn.RMSNorm(config.hidden_size)
        outer.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        return dict(outer.named_parameters())


def active_parameters(config: DeepseekV41TextConfig, parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    """Parameters that one token's forward reads, by part: one row of the embedding, the rows that its n-grams hash to,
    its experts, and all else.
    """
    counts: dict[str, int] = {}
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    for name, parameter in parameters.items():
        part, count = part_of(name), parameter.numel()
        if part == "embedding":
            count = parameter.shape[1]
        elif part == "Engram tables":
            count = columns * parameter.shape[1]
        elif part == "routed experts":
            count = count // config.n_routed_experts * config.num_experts_per_tok
        counts[part] = counts.get(part, 0) + count
    return counts


@dataclass(frozen=True)
class RankBytes:
    """Bytes that the fullest rank holds from step to step.

    Attributes:
        weights: fp32 parameters.
        gradients: fp32. Engram tables updated by rows have none of their size.
        optimizer: Its state.
        gathered: Weights of the largest block and of the head, whole, in the compute dtype: what a rank holds of the
            others' while it computes, with the next block fetched ahead.
        engram_rows: Rows of each Engram table, not bytes.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    engram_rows: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes in total."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def bytes_per_rank(
    parameters: dict[str, nn.Parameter], optimizer: OptimizerConfig, world_size: int, compute_bytes: int = FP32
) -> RankBytes:
    """Bytes held by rank 0 of `world_size`, which has as many rows of everything as any other.

    Args:
        parameters: Of `named_parameters`.
        optimizer: Decides on state, and on gradients of tables.
        world_size: Ranks, at least 1.
        compute_bytes: Of a gathered element: 4, or 2 with ``mixed_precision: bf16``.

    Raises:
        ValueError: `world_size` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size: must be at least 1, got {world_size}")
    weights = gradients = state = 0
    units: dict[str, int] = {}
    rows_held = []
    for name, parameter in parameters.items():
        rows = len(owned_rows(parameter.shape[0], world_size, 0))
        count = rows * math.prod(parameter.shape[1:])
        group = group_of(name, parameter, optimizer)
        by_rows = group == "tables" and optimizer.tables == "rows"
        weights += FP32 * count
        gradients += 0 if by_rows else FP32 * count
        state += FP32 * count * (1 if group == "muon" else 2) + (FP32 * rows if by_rows else 0)
        if group == "tables":
            rows_held.append(rows)
        elif world_size > 1:
            unit = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "outer"
            units[unit] = units.get(unit, 0) + compute_bytes * parameter.numel()
    outer = units.pop("outer", 0)
    return RankBytes(weights, gradients, state, outer + 2 * max(units.values(), default=0), tuple(rows_held))


# ------------------------------------------------------------------ savings of sharing and selecting


class Saving(NamedTuple):
    """Cost of a way of attending. Bytes are those of the formats of docs/ARCHITECTURE.md, section 8.

    Attributes:
        name: Of the way.
        parameters: Of the whole model.
        attention_parameters: Of attention and indexers.
        flops: By length of a sequence: training FLOPs per token, the mean over the sequence.
        token_bytes: Growth of a cache with each token, all layers together, once windows are full.
        cache_bytes: By length: its size, windows included.
        keys_read: By length: keys that the attention of the last query reads, all layers together.
        keys_scored: By length: index keys that its indexers score.
    """

    name: str
    parameters: int
    attention_parameters: int
    flops: dict[int, float]
    token_bytes: float
    cache_bytes: dict[int, int]
    keys_read: dict[int, int]
    keys_scored: dict[int, int]


def without_sharing(config: DeepseekV41TextConfig) -> DeepseekV41TextConfig:
    """`config` with keys and a selection of its own for every layer that sees compressed positions."""
    own = [layer for layer, ratio in enumerate(config.compress_ratios) if ratio > 0]
    return DeepseekV41TextConfig(**config.fields() | {"kv_source_layer_ids": own, "index_source_layer_ids": own})


def _stored_bytes(width: int, bits: int, group: int) -> int:
    """Bytes of a vector in a cache: values, two to a byte if they have 4 bits, and a scale of a byte per group."""
    return -(-width * bits // 8) + -(-width // group)


def saving(name: str, config: DeepseekV41TextConfig, lengths: Sequence[int]) -> Saving:
    """Cost of the attention of `config`.

    The tokens of a group that is not complete yet, of which a cache has to keep something, are not counted.

    Args:
        name: To call it.
        config: With `vocab_size` filled in.
        lengths: Of sequences.

    Raises:
        ValueError: Caches are not rounded, so that there is no format to count bytes of, or as `flops_per_sequence`.
    """
    if not config.quantized_caches:
        raise ValueError("quantized_caches: must be true, since the bytes are those of the rounded formats")
    parameters = named_parameters(config)
    plans = layer_plans(config)
    dense = config.attention == "full"
    raw_bytes = len(plans) * _stored_bytes(config.head_dim, 8, 32)
    compressed_bytes = _stored_bytes(config.head_dim, 4, 16) + _stored_bytes(config.index_head_dim, 4, 32)
    owned = [plan.ratio for plan in plans if plan.compressed_kv == plan.layer]
    flops, cached, read, scored = {}, {}, {}, {}
    for length in lengths:
        flops[length] = sum(part.training for part in flops_per_sequence(config, length).values()) / length
        # Of the last query, by index source.
        seen = {
            plan.layer: int(scored_positions(config, plan.layer, length)[-1])
            for plan in plans
            if plan.selection == plan.layer
        }
        scored[length] = sum(seen.values())
        raw = length if dense else min(length, config.sliding_window)
        cached[length] = raw * raw_bytes + sum(length // ratio for ratio in owned) * compressed_bytes
        chosen = [min(seen[plan.selection], config.index_topk) for plan in plans if plan.selection is not None]
        read[length] = len(plans) * raw + sum(chosen)
    return Saving(
        name,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        attention_parameters=sum(
            parameter.numel() for path, parameter in parameters.items() if part_of(path) in ("attention", "indexer")
        ),
        flops=flops,
        token_bytes=raw_bytes if dense else sum(compressed_bytes / ratio for ratio in owned),
        cache_bytes=cached,
        keys_read=read,
        keys_scored=scored,
    )


def savings(config: DeepseekV41TextConfig, lengths: Sequence[int]) -> list[Saving]:
    """A configuration as it is, without sharing, and with dense attention: see `saving`.

    Raises:
        ValueError: `attention` is not "csa2", or as `saving`.
    """
    if config.attention != "csa2":
        raise ValueError(f"attention: must be 'csa2' to share anything, got {config.attention!r}")
    dense = DeepseekV41TextConfig(**config.fields() | {"attention": "full"})
    return [
        saving("shared, as configured", config, lengths),
        saving("every layer its own", without_sharing(config), lengths),
        saving("dense attention", dense, lengths),
    ]


def savings_table(rows: Sequence[Saving]) -> str:
    """Markdown of `savings`, a column for each."""
    lengths = list(rows[0].flops)
    lines = [
        ("parameters", *(readable_count(row.parameters) for row in rows)),
        ("parameters of attention and indexers", *(readable_count(row.attention_parameters) for row in rows)),
        *(
            (f"training FLOPs per token, {n:,} tokens", *(readable_count(row.flops[n]) for row in rows))
            for n in lengths
        ),
        ("bytes that a token adds to a cache", *(f"{row.token_bytes:,.0f}" for row in rows)),
        *((f"cache of {n:,} tokens", *(readable_size(row.cache_bytes[n]) for row in rows)) for n in lengths),
    ]
    for n in lengths:
        lines.append((f"keys read by query {n:,}", *(f"{row.keys_read[n]:,}" for row in rows)))
        lines.append((f"index keys scored by query {n:,}", *(f"{row.keys_scored[n]:,}" for row in rows)))
    return markdown_table(("", *(row.name for row in rows)), lines)
