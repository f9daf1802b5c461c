"""Cost of a configuration: parameters, operations and bytes, without building it.

Shapes are those of the real modules, built on the meta device, so the counts are exact. Bytes are those of a rank of
`EngramFSDPStrategy`, which holds its rows of everything: fp32 weights and gradients, and the optimizer's state. What a
forward keeps for backward is not counted: it grows with batch and length, and with what is recomputed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from dsv41.backend import BackendConfig
from dsv41.config import DeepseekV41TextConfig
from dsv41.cost import part_of
from dsv41.model import DeepseekV41Block
from dsv41.ranks import owned_rows
from lightning_modules.optim.groups import OptimizerConfig, group_of

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
