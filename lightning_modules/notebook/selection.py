"""What an indexer selects of what attention would look at, and what sharing between layers saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv41.config import DeepseekV41TextConfig
from dsv41.cost import flops_per_sequence, part_of, scored_positions
from dsv41.ops.selection import membership
from dsv41.schedule import LayerPlan, layer_plans
from lightning_modules.budget import named_parameters
from lightning_modules.insight.engram_gates import readable
from lightning_modules.insight.selection import selection_recall, visible_mass
from lightning_modules.insight.shapes import Attended
from lightning_modules.inspecting import readable_count, readable_size
from lightning_modules.notebook.code_spans import code, code_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ------------------------------------------------------------------ what is selected


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
        seen: Of `tour.attended`.
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
        seen: Of `tour.attended`.

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


def recalls_table(rows: Sequence[Recall]) -> str:
    """Markdown of `recalls`."""
    lines = ["| layer | ratio | kept | by chance | at best | queries |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        shares = " | ".join(f"{share:.3f}" for share in (row.kept, row.chance, row.best))
        lines.append(f"| {row.plan.layer}, {row.plan.role} | {row.plan.ratio} | {shares} | {row.queries:,} |")
    return "\n".join(lines) + "\n"


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
    """What a query selects, the heaviest first.

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
    lines = [
        f"Layer {mass.plan.layer}, {mass.plan.role}, ratio {mass.plan.ratio}: query {query} is "
        f"{code(readable(texts[query], None))}, after {code(readable(before, None))}.",
        "",
        "| compressed position | tokens | share of the mass | over an even spread |",
        "|---:|---|---:|---:|",
    ]
    lines += [
        f"| {one.position} | {code_cell(readable(one.text, None))} | {one.share:.1%} | {one.share * visible:.2f} |"
        for one in read[:most]
    ]
    together = sum(one.share for one in read)
    spread = f"{together * visible / len(read):.2f}" if read else ""
    lines.append(f"| all {len(read)} selected of {visible} | | {together:.1%} | {spread} |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ what sharing saves


class Saving(NamedTuple):
    """What a way of attending costs. Bytes are those of the formats of docs/ARCHITECTURE.md, section 8.

    Attributes:
        name: Of the way.
        parameters: Of the whole model.
        attention_parameters: Of attention and indexers.
        flops: By length of a sequence: training FLOPs per token, the mean over the sequence.
        token_bytes: What a cache grows by with each token, all layers together, once windows are full.
        cache_bytes: By length: what it holds, windows included.
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
    """Of a vector in a cache: its values, two to a byte if they have 4 bits, and a scale of a byte per group."""
    return -(-width * bits // 8) + -(-width // group)


def saving(name: str, config: DeepseekV41TextConfig, lengths: Sequence[int]) -> Saving:
    """What the attention of `config` costs.

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
    lines = [f"| | {' | '.join(row.name for row in rows)} |", "|---|" + "---:|" * len(rows)]

    def line(what: str, cells: Sequence[str]) -> None:
        lines.append(f"| {what} | {' | '.join(cells)} |")

    lengths = list(rows[0].flops)
    line("parameters", [readable_count(row.parameters) for row in rows])
    line("parameters of attention and indexers", [readable_count(row.attention_parameters) for row in rows])
    for length in lengths:
        line(f"training FLOPs per token, {length:,} tokens", [readable_count(row.flops[length]) for row in rows])
    line("bytes that a token adds to a cache", [f"{row.token_bytes:,.0f}" for row in rows])
    for length in lengths:
        line(f"cache of {length:,} tokens", [readable_size(row.cache_bytes[length]) for row in rows])
    for length in lengths:
        line(f"keys read by query {length:,}", [f"{row.keys_read[length]:,}" for row in rows])
        line(f"index keys scored by query {length:,}", [f"{row.keys_scored[length]:,}" for row in rows])
    return "\n".join(lines) + "\n"
