"""Keys that each query reads: what the attention of every layer is given in one forward, and its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsv41.attention import AttentionCore
from dsv41.model import DeepseekV41ForCausalLM
from dsv41.ops.dense_attention import window_mask
from dsv41.ops.selection import membership, visible_positions
from dsv41.schedule import LayerPlan, layer_plans
from lightning_modules.insight.hooks import Taps, watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Attended(NamedTuple):
    """Arguments of an attention core in a forward.

    Attributes:
        plan: Of its layer.
        core: The attention core.
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
    """Arguments of the attention of each layer in one forward.

    Args:
        model: Built.
        batch: `input_ids` and `attention_mask`, [B, S].
    """
    found: list[Attended] = []

    def see(plan: LayerPlan, core: AttentionCore, given: tuple[Any, ...]) -> None:
        found.append(Attended(plan, core, *given))

    def listen(taps: Taps) -> None:
        for plan, block in zip(layer_plans(model.config.text_config), model.model.layers, strict=True):
            core: Any = block.attn.core
            taps.before(core, partial(see, plan, core))

    watch(model, batch, listen)
    return found


class KeyMask(NamedTuple):
    """Mask of a layer: the keys that the first queries of a row read.

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
