"""What passes through a model in one forward: shapes, owners of what layers share, and keys that queries read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dsv41.attention import AttentionCore
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.ops.dense_attention import window_mask
from dsv41.ops.selection import membership, visible_positions
from dsv41.schedule import LayerPlan, layer_plans
from lightning_modules.insight.drawing import heat_map, new_axes
from lightning_modules.notebook.taps import See, watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ------------------------------------------------------------------ shapes


class Shape(NamedTuple):
    """A tensor of the forward.

    Attributes:
        part: Where it is made or read.
        tensor: What it is.
        axes: Names of its axes: letters of docs/ARCHITECTURE.md, else fields of the configuration; "engrams" counts
            Engram layers, "columns" the n-gram hashes of a position, and "B*S" is both in one.
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


class _Tap(NamedTuple):
    part: str
    module: str
    tensor: str
    axes: str
    pick: Callable[[Any, Any], Tensor | None]  # from arguments and result of the module


_BLOCK = "model.layers.{layer}"
# In the order in which they come to be.
_TAPS = (
    _Tap("input", "model.embed_tokens", "token ids", "B S", lambda given, made: given[0]),
    _Tap("input", "model.embed_tokens", "embedding", "B S H", lambda given, made: made),
    _Tap("input", "model.engram_hash", "table rows of n-grams", "B S engrams columns", lambda given, made: made),
    _Tap("input", "model.layers.0", "residual streams", "B S C H", lambda given, made: given[0]),
    _Tap("input", "model.layers.0", "first mixture to read", "B S C", lambda given, made: given[1]),
    _Tap("Engram", f"{_BLOCK}.engram.embed", "memory", "B S columns engram_head_dim", lambda given, made: made),
    _Tap("Engram", f"{_BLOCK}.engram", "streams with memory", "B S C H", lambda given, made: made),
    _Tap("mHC, attention", f"{_BLOCK}.attn_hc", "read from streams", "B S H", lambda given, made: made[0]),
    _Tap("mHC, attention", f"{_BLOCK}.attn_hc", "pre: mixture for the next site", "B S C", lambda given, made: made[1]),
    _Tap("mHC, attention", f"{_BLOCK}.attn_hc", "post: weights to write with", "B S C", lambda given, made: made[2]),
    _Tap("mHC, attention", f"{_BLOCK}.attn_hc", "comb: mixing of streams", "B S C C", lambda given, made: made[3]),
    _Tap("attention", f"{_BLOCK}.attn.q_norm", "query latent", "B S q_lora_rank", lambda given, made: made),
    _Tap("attention", f"{_BLOCK}.attn.core", "queries", "B S num_attention_heads D", lambda given, made: given[0]),
    _Tap("attention", f"{_BLOCK}.attn.core", "window KV", "B S D", lambda given, made: given[1]),
    _Tap("attention", f"{_BLOCK}.attn.compressor", "latent, made here", "B T D", lambda given, made: made),
    _Tap("attention", f"{_BLOCK}.attn.core", "compressed KV", "B T D", lambda given, made: given[2]),
    _Tap("attention", f"{_BLOCK}.attn.indexer", "index keys", "B T index_head_dim", lambda given, made: given[2]),
    _Tap("attention", f"{_BLOCK}.attn.indexer", "pool of candidate blocks", "B S N", lambda given, made: made[1]),
    _Tap("attention", f"{_BLOCK}.attn.core", "selection", "B S K", lambda given, made: given[3]),
    _Tap("attention", f"{_BLOCK}.attn.core", "attended", "B S num_attention_heads D", lambda given, made: made[0]),
    _Tap("attention", f"{_BLOCK}.attn", "result", "B S H", lambda given, made: made[0]),
    _Tap("mHC, experts", f"{_BLOCK}.ffn_hc", "streams, written", "B S C H", lambda given, made: given[0]),
    _Tap("mHC, experts", f"{_BLOCK}.ffn_hc", "read from streams", "B S H", lambda given, made: made[0]),
    _Tap("router", f"{_BLOCK}.ffn.gate", "scores", "B*S n_routed_experts", lambda given, made: made.scores),
    _Tap("router", f"{_BLOCK}.ffn.gate", "chosen experts", "B*S num_experts_per_tok", lambda given, made: made.experts),
    _Tap("experts", f"{_BLOCK}.ffn.experts", "routed, summed", "B*S H", lambda given, made: made),
    _Tap("experts", f"{_BLOCK}.ffn.shared_experts", "shared", "B*S H", lambda given, made: made),
    _Tap("experts", f"{_BLOCK}.ffn", "result", "B S H", lambda given, made: made[0]),
    _Tap("end of the block", _BLOCK, "streams, written", "B S C H", lambda given, made: made[0]),
    _Tap("end of the block", _BLOCK, "mixture for the next block", "B S C", lambda given, made: made[1]),
    _Tap("output", "model.norm", "read from streams", "B S H", lambda given, made: given[0]),
    _Tap("output", "model.norm", "normed", "B S H", lambda given, made: made),
    _Tap("output", "", "logits", "B S V", lambda given, made: made.logits),
)


def shapes(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor]) -> list[Shape]:
    """The tensors of one forward, as they pass the borders of its modules.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, [B, S].

    Returns:
        In the order of the computation; blocks whose tensor is alike share an entry.
    """
    modules = dict(model.named_modules())
    found: list[dict[tuple[tuple[int, ...], torch.dtype], list[int]]] = [{} for _ in _TAPS]

    def note(number: int, layer: int | None, given: tuple[Any, ...], made: Any) -> None:
        tensor = _TAPS[number].pick(given, made)
        if tensor is not None:
            layers = found[number].setdefault((tuple(tensor.shape), tensor.dtype), [])
            layers += [] if layer is None else [layer]

    taps: list[tuple[nn.Module, See]] = []
    for number, tap in enumerate(_TAPS):
        for layer in model.config.text_config.layers if _BLOCK in tap.module else (None,):
            module = modules.get(tap.module.format(layer=layer))
            if module is not None:
                taps.append((module, partial(note, number, layer)))
    watch(model, batch, taps)
    return [
        Shape(tap.part, tap.tensor, tuple(tap.axes.split()), shape, dtype, tuple(layers))
        for tap, alike in zip(_TAPS, found, strict=True)
        for (shape, dtype), layers in alike.items()
    ]


def shapes_table(rows: Sequence[Shape]) -> str:
    """Markdown of `shapes`."""
    lines = ["| part | tensor | axes | shape | type | layers |", "|---|---|---|---|---|---|"]
    for row in rows:
        axes, sizes = ", ".join(row.axes), ", ".join(map(str, row.shape))
        kind, layers = str(row.dtype).removeprefix("torch."), ", ".join(map(str, row.layers))
        lines.append(f"| {row.part} | {row.tensor} | `[{axes}]` | `[{sizes}]` | {kind} | {layers} |")
    return "\n".join(lines) + "\n"


def parameters_table(counts: Mapping[str, int]) -> str:
    """Markdown of `dsv41.cost.parameters_by_part`."""
    total = sum(counts.values())
    lines = ["| part | parameters | share |", "|---|---:|---:|"]
    lines += [f"| {part} | {count:,} | {count / total:.1%} |" for part, count in counts.items()]
    return "\n".join([*lines, f"| together | {total:,} | 100.0% |"]) + "\n"


# ------------------------------------------------------------------ who owns what


_SHARED = {
    "compressed_kv": "compressed KV",
    "index_keys": "index keys",
    "selection": "selection",
    "candidate_pool": "candidate pool",
}
_COLOURS = 12  # of the palette; neighbouring owners differ


def schedule_picture(plans: Sequence[LayerPlan]) -> Figure:
    """Layers across, what they share down: coloured by the layer that owns it, empty where a layer has no use for it.

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


# ------------------------------------------------------------------ which keys are read


class Attended(NamedTuple):
    """What an attention core is given in a forward.

    Attributes:
        plan: Of its layer.
        core: Attends.
        q, kv, compressed, selection, token_mask: See `AttentionCore.forward`.
    """

    plan: LayerPlan
    core: AttentionCore
    q: Tensor
    kv: Tensor
    compressed: Tensor | None
    selection: Tensor | None
    token_mask: Tensor


def attended(model: DeepseekV41ForCausalLM, batch: Mapping[str, Tensor]) -> list[Attended]:
    """What the attention of each layer is given in one forward.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, [B, S].
    """
    found: list[Attended] = []
    taps: list[tuple[nn.Module, See]] = []
    for plan, block in zip(layer_plans(model.config.text_config), model.model.layers, strict=True):
        core: Any = block.attn.core

        def see(given: tuple[Any, ...], _: Any, plan: LayerPlan = plan, core: AttentionCore = core) -> None:
            found.append(Attended(plan, core, *given))

        taps.append((core, see))
    watch(model, batch, taps)
    return found


class KeyMask(NamedTuple):
    """Which keys the first queries of a row read.

    Attributes:
        plan: Of the layer.
        raw: Bool [queries, queries], the window.
        compressed: Bool [queries, positions], the selection; without positions where the layer sees none.
    """

    plan: LayerPlan
    raw: Tensor
    compressed: Tensor

    @property
    def share(self) -> float:
        """Keys read, over those that dense causal attention of the same queries would read."""
        live = int(self.raw.any(-1).sum())
        return int(self.raw.sum() + self.compressed.sum()) / (live * (live + 1) // 2)


def key_masks(seen: Sequence[Attended], tokens: int = 48, row: int = 0) -> list[KeyMask]:
    """The mask of each layer's attention.

    Args:
        seen: Of `attended`.
        tokens: Queries, from the first of the row.
        row: Of the batch.

    Raises:
        ValueError: `row` or `tokens` is out of range, or there is nothing but padding.
    """
    rows, length = seen[0].token_mask.shape
    if not 0 <= row < rows:
        raise ValueError(f"row: must lie in 0..{rows - 1}, got {row}")
    if not 1 <= tokens <= length:
        raise ValueError(f"tokens: must lie in 1..{length}, got {tokens}")
    if not seen[0].token_mask[row, 0]:
        raise ValueError(f"row: {row} is padding alone")
    masks = []
    for one in seen:
        live = one.token_mask[row : row + 1]
        raw = (window_mask(live, one.core.window or length)[0] & live.mT)[:tokens, :tokens]
        compressed = raw[:, :0]
        if one.compressed is not None and one.selection is not None:
            chosen = membership(one.selection[row], one.compressed.shape[1]) & live.mT
            compressed = chosen[:tokens, : tokens // one.plan.ratio]
        masks.append(KeyMask(one.plan, raw, compressed))
    return masks


_KINDS = {
    1: ("earlier, not read", "0.88"),
    2: ("raw position, read", "tab:blue"),
    3: ("compressed position, read", "tab:orange"),
}
_GAP = 3  # columns between raw and compressed positions


def _draw_mask(axes: Axes, raw: Tensor, compressed: Tensor, ratio: int, title: str) -> None:
    from matplotlib.colors import ListedColormap

    tokens, positions = compressed.shape
    earlier = torch.ones_like(raw).tril() & raw.any(-1, keepdim=True)
    left = torch.where(raw, 2, earlier.long())
    ended = visible_positions(tokens, positions, max(ratio, 1), raw.device) & raw.any(-1, keepdim=True)
    right = torch.where(compressed, 3, ended.long())
    both = torch.cat((left, left.new_zeros(tokens, _GAP), right), dim=1).cpu().numpy()
    colours = ListedColormap(["white", *(colour for _, colour in _KINDS.values())])
    axes.imshow(both, cmap=colours, vmin=0, vmax=3, interpolation="nearest")
    step = 16 if tokens > 32 else 4
    marks, ends = range(0, tokens, step), range(0, positions, step)
    axes.set_xticks([*marks, *(tokens + _GAP + end for end in ends)], [*map(str, marks), *map(str, ends)], fontsize=7)
    axes.set_yticks(marks, [str(mark) for mark in marks], fontsize=7)
    axes.set_ylabel("query", fontsize=7)
    axes.set_xlabel("raw positions, then compressed positions" if positions else "raw positions", fontsize=7)
    axes.set_title(title, fontsize=8)
    axes.spines[:].set_visible(False)


def masks_picture(masks: Sequence[KeyMask]) -> Figure:
    """Queries down, keys across, a panel per layer; the first panel is dense causal attention.

    Args:
        masks: Of `key_masks`, at least one.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across = 2
    down = -(-(len(masks) + 1) // across)
    figure = Figure(figsize=(10.5, 0.6 + 2.9 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    live = masks[0].raw.any(-1)
    dense = torch.ones_like(masks[0].raw).tril() & live.unsqueeze(-1)
    _draw_mask(panels[0], dense, dense[:, :0], 0, "dense causal attention: 100% of its keys")
    for axes, mask in zip(panels[1:], masks, strict=False):
        ratio = f", ratio {mask.plan.ratio}" if mask.plan.ratio else ""
        title = f"layer {mask.plan.layer}, {mask.plan.role}{ratio}: {mask.share:.0%} of the keys of dense attention"
        _draw_mask(axes, mask.raw, mask.compressed, mask.plan.ratio, title)
    for axes in panels[len(masks) + 1 :]:
        axes.set_axis_off()
    figure.legend(
        handles=[Patch(facecolor=colour, label=name) for name, colour in _KINDS.values()],
        loc="outside upper center",
        ncols=len(_KINDS),
        fontsize=8,
        frameon=False,
    )
    return figure
