"""Selection of the indexers: the attention mass that it keeps, by layer, query and text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from dsv41.attention import AttentionCore
from dsv41.model import DeepseekV41Block
from dsv41.ops.selection import membership, visible_positions
from dsv41.schedule import LayerPlan
from lightning_modules.insight.drawing import show_constant
from lightning_modules.insight.hooks import ValidationObserver, log, over_ranks
from lightning_modules.insight.key_masks import Attended
from lightning_modules.text import code, code_cell, markdown_table, readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Sums over queries: what the selection keeps, what an even spread or the best selection would keep, and how many.
_KEPT, _EVEN, _BEST, _QUERIES = range(4)


@torch.no_grad()
def visible_mass(core: AttentionCore, q: Tensor, kv: Tensor, compressed: Tensor, token_mask: Tensor) -> Tensor:
    """Attention mass on each compressed position for queries that attend to all that they can see.

    Args:
        core: Attends.
        q, kv, compressed, token_mask: See `AttentionCore.forward`.

    Returns:
        float64 [B, S, T], the attention's probability summed over heads; zero where invisible and at padding.
    """
    positions = compressed.shape[1]
    visible = visible_positions(q.shape[1], positions, core.ratio, q.device)
    everything = torch.arange(positions, device=q.device).masked_fill(~visible, -1).expand(len(q), -1, -1)
    mass = core.forward(q, kv, compressed, everything, token_mask, with_mass=True)[1]
    assert mass is not None
    return mass.double()


@torch.no_grad()
def selection_recall(
    core: AttentionCore, q: Tensor, kv: Tensor, compressed: Tensor, selection: Tensor, token_mask: Tensor
) -> Tensor:
    """Sums over queries of the share of attention mass on compressed positions that lies in the selection.

    The mass is `visible_mass`. Live queries that see more positions than they select take part; the others have no
    choice.

    Args:
        core: Attends.
        q, kv, compressed, selection, token_mask: See `AttentionCore.forward`.

    Returns:
        float64 [4]: the share that the selection keeps; positions selected over positions seen, which is what a
        selection by chance keeps on average; the share that the same number of the heaviest positions has; and the
        number of queries.
    """
    positions = compressed.shape[1]
    mass = visible_mass(core, q, kv, compressed, token_mask)
    chosen = selection >= 0
    seen = visible_positions(q.shape[1], positions, core.ratio, q.device).sum(-1).expand(len(q), -1)
    count, total = chosen.sum(-1), mass.sum(-1)
    taking_part = (seen > count) & (total > 0)  # padding has no mass
    kept = mass.gather(-1, selection.clamp_min(0)).masked_fill(~chosen, 0.0).sum(-1)
    # Of the heaviest, as many as the query selects.
    heaviest = mass.sort(-1, descending=True).values
    best = heaviest.masked_fill(torch.arange(positions, device=q.device) >= count.unsqueeze(-1), 0.0).sum(-1)
    shares = torch.stack((kept / total, count.double() / seen.clamp_min(1), best / total, torch.ones_like(total)))
    return shares.masked_fill(~taking_part, 0.0).sum((1, 2))


class Mass(NamedTuple):
    """Of a layer with a selection of its own and a row of the batch.

    Attributes:
        plan: Of the layer.
        share: float64 [S, T], of a query's attention on compressed positions if all visible ones were attended, summed
            over heads, what lies on each: rows add up to 1, or to 0 where nothing is visible and at padding.
        selected: Bool [S, T], the selection.
    """

    plan: LayerPlan
    share: Tensor
    selected: Tensor


def _selecting(seen: Sequence[Attended]) -> list[tuple[Attended, Tensor, Tensor]]:
    """Layers with a selection of their own, with their compressed keys and selections."""
    own = [
        (one, one.compressed, one.selection)
        for one in seen
        if one.plan.selection == one.plan.layer and one.compressed is not None and one.selection is not None
    ]
    if not own:
        raise ValueError("model.config.index_source_layer_ids: no layer of this model selects compressed positions")
    return own


def masses(seen: Sequence[Attended], row: int = 0) -> list[Mass]:
    """Where attention would go, and what the indexer selects, for each layer with a selection of its own.

    Args:
        seen: Of `key_masks.attended`.
        row: Of the batch.

    Raises:
        ValueError: `row` is out of range, or no layer selects.
    """
    own = _selecting(seen)
    rows = len(own[0][2])
    if not 0 <= row < rows:
        raise ValueError(f"row: must lie in 0..{rows - 1}, got {row}")
    found = []
    for one, compressed, selection in own:
        part = slice(row, row + 1)
        mass = visible_mass(one.core, one.q[part], one.kv[part], compressed[part], one.token_mask[part])[0]
        total = mass.sum(-1, keepdim=True)
        share = torch.where(total > 0, mass / total, 0.0)
        found.append(Mass(one.plan, share, membership(selection[row], compressed.shape[1])))
    return found


def _require_query(query: int, mass: Mass, field: str) -> None:
    if not 0 <= query < len(mass.share):
        raise ValueError(f"{field}: must lie in 0..{len(mass.share) - 1}, got {query}")


def mass_picture(found: Sequence[Mass], first: int, count: int = 48) -> Figure:
    """Queries down, compressed positions across, a panel per layer: colour is what attention would give a position,
    over an even spread; a dot marks a selected one.

    Args:
        found: Of `masses`.
        first: First query.
        count: Queries.

    Raises:
        ValueError: A query does not exist, or there is nothing that the queries see.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    _require_query(first, found[0], "first")
    left = len(found[0].share) - first
    if not 1 <= count <= left:
        raise ValueError(f"count: must lie in 1..{left}, got {count}")
    if first + count < max(mass.plan.ratio for mass in found):
        raise ValueError(f"count: the queries {first}..{first + count - 1} see no compressed position yet; take more")
    queries = slice(first, first + count)
    spreads = []
    for mass in found:
        seen = torch.arange(first + 1, first + count + 1) // mass.plan.ratio
        share = mass.share[queries, : int(seen[-1])].cpu()
        spreads.append((share * seen.unsqueeze(-1)).masked_fill(share == 0, float("nan")).numpy())
    away = np.abs(np.log(np.concatenate([spread[spread > 0] for spread in spreads])))
    # Symmetric around an even spread, and not stretched by a few positions.
    limit = max(1.1, float(np.exp(np.quantile(away, 0.995)))) if len(away) else 1.1  # none: padding alone
    figure = Figure(figsize=(12, 0.5 + 2.9 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False).flatten()
    for axes, mass, spread in zip(panels, found, spreads, strict=True):
        positions = spread.shape[1]
        image = axes.imshow(
            spread,
            norm=LogNorm(1 / limit, limit),
            cmap="RdBu_r",
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, positions - 0.5, first + count - 0.5, first - 0.5),
        )
        at = mass.selected[queries, :positions].cpu().nonzero().numpy()
        axes.scatter(at[:, 1], at[:, 0] + first, s=3, color="black", linewidths=0)
        axes.set_title(f"layer {mass.plan.layer}, {mass.plan.role}, ratio {mass.plan.ratio}", fontsize=9)
        axes.set_ylabel("query (position in the row)", fontsize=8)
        axes.set_xlabel("compressed position", fontsize=8)
        axes.tick_params(labelsize=7)
        bar = figure.colorbar(image, ax=axes, extend="both", pad=0.01)
        bar.ax.minorticks_off()
        bar.set_ticks([1 / limit, 1, limit], labels=[f"{1 / limit:.2g}x", "even", f"{limit:.2g}x"], fontsize=7)
        bar.set_label("attention mass", fontsize=8)
    return figure


class Recall(NamedTuple):
    """Of a layer with a selection of its own, means over the queries that see more than they select.

    Attributes:
        plan: Of the layer.
        kept: Share of the attention mass on visible compressed positions that lies in the selection.
        chance: What as many positions drawn evenly keep on average.
        best: What the heaviest as many keep.
        queries: Their number.
    """

    plan: LayerPlan
    kept: float
    chance: float
    best: float
    queries: int


def recalls(seen: Sequence[Attended]) -> list[Recall]:
    """`selection_recall` of each layer with a selection of its own, over the rows of the batch; without layers in
    which no query has a choice.

    Args:
        seen: Of `key_masks.attended`.

    Raises:
        ValueError: No layer selects.
    """
    found = []
    for one, compressed, selection in _selecting(seen):
        *sums, queries = selection_recall(one.core, one.q, one.kv, compressed, selection, one.token_mask).tolist()
        if queries:
            kept, chance, best = (value / queries for value in sums)
            found.append(Recall(one.plan, kept, chance, best, round(queries)))
    return found


class ReadPosition(NamedTuple):
    """A compressed position that a query reads.

    Attributes:
        position: Its number.
        text: Of the tokens that it stands for.
        share: Of the query's attention mass on visible compressed positions.
    """

    position: int
    text: str
    share: float


def positions_read(mass: Mass, query: int, texts: Sequence[str]) -> list[ReadPosition]:
    """Positions that a query selects, the heaviest first.

    Args:
        mass: Of `masses`.
        query: Position in the row.
        texts: Of the row's tokens.

    Raises:
        ValueError: There is no such query, or texts are missing.
    """
    _require_query(query, mass, "query")
    if len(texts) != len(mass.share):
        raise ValueError(f"texts: must be those of the row's {len(mass.share)} tokens, got {len(texts)}")
    ratio = mass.plan.ratio
    found = [
        ReadPosition(at, "".join(texts[at * ratio : (at + 1) * ratio]), float(mass.share[query, at]))
        for at in mass.selected[query].nonzero()[:, 0].tolist()
    ]
    return sorted(found, key=lambda read: -read.share)


def positions_table(mass: Mass, query: int, texts: Sequence[str], most: int = 10) -> str:
    """Markdown of `positions_read`: the query in its text, its `most` heaviest positions, and all of them together."""
    read = positions_read(mass, query, texts)
    visible = (query + 1) // mass.plan.ratio
    before = "".join(texts[max(0, query - 7) : query])
    title = (
        f"Layer {mass.plan.layer}, {mass.plan.role}, ratio {mass.plan.ratio}: query {query} is "
        f"{code(readable(texts[query], None))}, after {code(readable(before, None))}.\n\n"
    )
    rows = [
        (one.position, code_cell(readable(one.text, None)), f"{one.share:.1%}", f"{one.share * visible:.2f}")
        for one in read[:most]
    ]
    together = sum(one.share for one in read)
    spread = f"{together * visible / len(read):.2f}" if read else ""
    titles = ("compressed position", "tokens", "share of the mass", "over an even spread")
    whole = (f"all {len(read)} selected of {visible}", "", f"{together:.1%}", spread)
    return title + markdown_table(titles, [*rows, whole], align="rlrr")


class IndexerRecall(ValidationObserver):
    """Logs the mean `selection_recall` over the first batches of every validation.

    ``within/indexer_recall`` is the mean over layers that select, ``within/indexer_recall/layer_N`` each of them;
    ``within/indexer_recall_best`` is what the best selection of that size would reach. What chance would reach,
    ``within/indexer_recall_chance``, stays the same in a run: ``dsv41 validate`` shows it, and in fit it is no curve
    but the text ``within/constants/indexer_recall_chance``. Nothing is logged where no query has a choice.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Each costs an attention over all visible
            positions in every layer that selects.
    """

    def __init__(self, batches: int = 2) -> None:
        super().__init__(batches)
        self._sums: dict[int, Tensor] = {}
        self._shown = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Show the constant anew: it may be another text."""
        self._shown = False

    def listen(self, pl_module: L.LightningModule) -> None:
        """See the arguments of the attention of layers that select."""
        self._sums = {}
        for module in pl_module.modules():
            if isinstance(module, DeepseekV41Block) and module.attn.indexer is not None:
                layer = module.attn.layer_idx
                self._sums[layer] = torch.zeros(4, dtype=torch.float64, device=pl_module.device)
                self.before(module.attn.core, partial(self._add, layer, module.attn.core))

    def _add(self, layer: int, core: AttentionCore, arguments: tuple[Tensor, ...]) -> None:
        self._sums[layer] += selection_recall(core, *arguments)

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the means, over all ranks."""
        if not self._sums:
            return
        layers = sorted(self._sums)
        total = over_ranks(trainer, torch.stack([self._sums[layer] for layer in layers]))
        chosen = {layer: row for layer, row in zip(layers, total, strict=True) if row[_QUERIES] > 0}
        for layer, row in chosen.items():
            log(pl_module, f"indexer_recall/layer_{layer}", row[_KEPT] / row[_QUERIES])
        if chosen:
            means = torch.stack([row / row[_QUERIES] for row in chosen.values()]).mean(0)
            log(pl_module, "indexer_recall", means[_KEPT])
            log(pl_module, "indexer_recall_best", means[_BEST])
            log(pl_module, "indexer_recall_chance", means[_EVEN], constant=True)
            if not self._shown:
                show_constant(trainer, "indexer_recall_chance", f"{float(means[_EVEN]):.4f}")
                self._shown = True
