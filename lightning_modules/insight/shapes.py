"""Shapes of the tensors in one forward, and owners of what layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv41.model import DeepseekV41ForCausalLM
from dsv41.schedule import LayerPlan
from lightning_modules.insight.drawing import heat_map, new_axes
from lightning_modules.insight.hooks import Taps, watch
from lightning_modules.text import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ------------------------------------------------------------------ shapes


class Shape(NamedTuple):
    """A tensor of the forward.

    Attributes:
        part: Part of the model that makes or reads it.
        tensor: Its name.
        axes: Names of its axes: letters of docs/ARCHITECTURE.md, else fields of the configuration; "engrams" counts
            Engram layers, "columns" the n-gram hashes of a position, "B*S" is batch and sequence in one axis.
        shape: Their sizes.
        dtype: Of its elements.
        layers: Blocks in which there is such a tensor; empty outside of blocks.
    """

    part: str
    tensor: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: tuple[int, ...]


class _Site(NamedTuple):
    part: str
    module: str
    tensor: str
    axes: str
    pick: Callable[[Any, Any], Tensor | None]  # from arguments and result of the module


_BLOCK = "model.layers.{layer}"
# In the order of the computation.
_SITES = (
    _Site("input", "model.embed_tokens", "token ids", "B S", lambda given, made: given[0]),
    _Site("input", "model.embed_tokens", "embedding", "B S H", lambda given, made: made),
    _Site("input", "model.engram_hash", "table rows of n-grams", "B S engrams columns", lambda given, made: made),
    _Site("input", "model.layers.0", "residual streams", "B S C H", lambda given, made: given[0]),
    _Site("input", "model.layers.0", "first mixture to read", "B S C", lambda given, made: given[1]),
    _Site("Engram", f"{_BLOCK}.engram.embed", "memory", "B S columns engram_head_dim", lambda given, made: made),
    _Site("Engram", f"{_BLOCK}.engram", "streams with memory", "B S C H", lambda given, made: made),
    _Site("mHC, attention", f"{_BLOCK}.attn_hc", "read from streams", "B S H", lambda given, made: made[0]),
    _Site(
        "mHC, attention", f"{_BLOCK}.attn_hc", "pre: mixture for the next site", "B S C", lambda given, made: made[1]
    ),
    _Site("mHC, attention", f"{_BLOCK}.attn_hc", "post: weights to write with", "B S C", lambda given, made: made[2]),
    _Site("mHC, attention", f"{_BLOCK}.attn_hc", "comb: mixing of streams", "B S C C", lambda given, made: made[3]),
    _Site("attention", f"{_BLOCK}.attn.q_norm", "query latent", "B S q_lora_rank", lambda given, made: made),
    _Site("attention", f"{_BLOCK}.attn.core", "queries", "B S num_attention_heads D", lambda given, made: given[0]),
    _Site("attention", f"{_BLOCK}.attn.core", "window KV", "B S D", lambda given, made: given[1]),
    _Site("attention", f"{_BLOCK}.attn.compressor", "latent, made here", "B T D", lambda given, made: made),
    _Site("attention", f"{_BLOCK}.attn.core", "compressed KV", "B T D", lambda given, made: given[2]),
    _Site("attention", f"{_BLOCK}.attn.indexer", "index keys", "B T index_head_dim", lambda given, made: given[2]),
    _Site("attention", f"{_BLOCK}.attn.indexer", "pool of candidate blocks", "B S N", lambda given, made: made[1]),
    _Site("attention", f"{_BLOCK}.attn.core", "selection", "B S K", lambda given, made: given[3]),
    _Site("attention", f"{_BLOCK}.attn.core", "attended", "B S num_attention_heads D", lambda given, made: made[0]),
    _Site("attention", f"{_BLOCK}.attn", "result", "B S H", lambda given, made: made[0]),
    _Site("mHC, experts", f"{_BLOCK}.ffn_hc", "streams, written", "B S C H", lambda given, made: given[0]),
    _Site("mHC, experts", f"{_BLOCK}.ffn_hc", "read from streams", "B S H", lambda given, made: made[0]),
    _Site("router", f"{_BLOCK}.ffn.gate", "scores", "B*S n_routed_experts", lambda given, made: made.scores),
    _Site(
        "router", f"{_BLOCK}.ffn.gate", "chosen experts", "B*S num_experts_per_tok", lambda given, made: made.experts
    ),
    _Site("experts", f"{_BLOCK}.ffn.experts", "routed, summed", "B*S H", lambda given, made: made),
    _Site("experts", f"{_BLOCK}.ffn.shared_experts", "shared", "B*S H", lambda given, made: made),
    _Site("experts", f"{_BLOCK}.ffn", "result", "B S H", lambda given, made: made[0]),
    _Site("end of the block", _BLOCK, "streams, written", "B S C H", lambda given, made: made[0]),
    _Site("end of the block", _BLOCK, "mixture for the next block", "B S C", lambda given, made: made[1]),
    _Site("output", "model.norm", "read from streams", "B S H", lambda given, made: given[0]),
    _Site("output", "model.norm", "normed", "B S H", lambda given, made: made),
    _Site("output", "", "logits", "B S V", lambda given, made: made.logits),
)


def shapes(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor]) -> list[Shape]:
    """Tensors of one forward, as its modules take and return them.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, [B, S].

    Returns:
        In the order of the computation; blocks whose tensor is alike share an entry.
    """
    modules = dict(model.named_modules())
    found: list[dict[tuple[tuple[int, ...], torch.dtype], list[int]]] = [{} for _ in _SITES]

    def note(number: int, layer: int | None, given: tuple[Any, ...], made: Any) -> None:
        tensor = _SITES[number].pick(given, made)
        if tensor is not None:
            layers = found[number].setdefault((tuple(tensor.shape), tensor.dtype), [])
            layers += [] if layer is None else [layer]

    def listen(taps: Taps) -> None:
        for number, site in enumerate(_SITES):
            for layer in model.config.text_config.layers if _BLOCK in site.module else (None,):
                module = modules.get(site.module.format(layer=layer))
                if module is not None:
                    taps.after(module, partial(note, number, layer))

    watch(model, batch, listen)
    return [
        Shape(site.part, site.tensor, tuple(site.axes.split()), shape, dtype, tuple(layers))
        for site, alike in zip(_SITES, found, strict=True)
        for (shape, dtype), layers in alike.items()
    ]


def shapes_table(rows: Sequence[Shape]) -> str:
    """Markdown of `shapes`."""
    cells = [
        (
            row.part,
            row.tensor,
            f"`[{', '.join(row.axes)}]`",
            f"`[{', '.join(map(str, row.shape))}]`",
            str(row.dtype).removeprefix("torch."),
            ", ".join(map(str, row.layers)),
        )
        for row in rows
    ]
    return markdown_table(("part", "tensor", "axes", "shape", "type", "layers"), cells, align="llllll")


# ------------------------------------------------------------------ who owns what


_SHARED = {
    "compressed_kv": "compressed KV",
    "index_keys": "index keys",
    "selection": "selection",
    "candidate_pool": "candidate pool",
}
_COLOURS = 12  # of the palette; neighbouring owners differ


def schedule_picture(plans: Sequence[LayerPlan]) -> Figure:
    """Picture of `layer_plans`: layers across, shared tensors down, coloured by the owner, empty where a layer reads
    none.

    Args:
        plans: Of `dsv41.schedule.layer_plans`.
    """
    owners = [[getattr(plan, name) for plan in plans] for name in _SHARED]
    numbers = {owner: n for n, owner in enumerate(sorted({o for row in owners for o in row if o is not None}))}
    colours = [[np.nan if owner is None else numbers[owner] % _COLOURS for owner in row] for row in owners]
    wide = len(plans) <= _COLOURS
    title = "who owns what the layers share"
    figure, axes = new_axes((0.95 if wide else 0.3) * len(plans), 2.4, title, left=1.2, bottom=0.9)
    heat_map(axes, np.array(colours), list(_SHARED.values()), [], 0, _COLOURS - 1, "Set3")
    for row, name in enumerate(_SHARED):
        for column, plan in enumerate(plans):
            owner = getattr(plan, name)
            if owner is not None:
                own = owner == plan.layer
                axes.text(
                    column,
                    row,
                    "own" if own else f"from {owner}",
                    ha="center",
                    va="center",
                    fontsize=8 if wide else 7,
                    fontweight="bold" if own else "normal",
                    rotation=0 if wide else 90,
                )
    gap = "\n" if wide else ", "
    names = [gap.join([str(p.layer), p.role, *([f"ratio {p.ratio}"] if p.ratio else [])]) for p in plans]
    axes.set_xticks(range(len(plans)), names, fontsize=7, rotation=0 if wide else 90)
    axes.set_xlabel("layer" if wide else "", fontsize=8)
    axes.set_xticks(np.arange(0.5, len(plans) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(_SHARED) - 1), minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    return figure
