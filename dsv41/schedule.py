"""Roles of layers: which layer owns the compressed keys, selections and candidate pool that an attention site reads.

One derivation from the configuration's schedules (`compress_ratios`, `kv_source_layer_ids`, `index_source_layer_ids`,
`candidate_source_layer_id`); docs/ARCHITECTURE.md, section 4. Attention, indexer, cost, model card and pictures
use it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from dsv41.config import DeepseekV41TextConfig

Role = Literal["Full", "Reindex", "Reuse", "window", "dense"]


class LayerPlan(NamedTuple):
    """Inputs of one attention site and the layers that make them; None where it has no such input.

    Attributes:
        layer: Zero-based.
        ratio: Tokens per compressed position; 0 if it sees none.
        role: "Full" (makes keys and a selection), "Reindex" (selects among shared keys) or "Reuse" (takes both from
            earlier layers); "window" or "dense" without compressed positions.
        compressed_kv: Owner of the compressed keys and values.
        index_keys: Owner of the keys that its indexer scores.
        selection: Owner of the selected positions.
        candidate_pool: Owner of the pool that its indexer makes or has to stay in.
    """

    layer: int
    ratio: int
    role: Role
    compressed_kv: int | None = None
    index_keys: int | None = None
    selection: int | None = None
    candidate_pool: int | None = None

    @property
    def makes_keys(self) -> bool:
        """Whether the layer compresses keys and values, and derives index keys from them."""
        return self.compressed_kv == self.layer

    @property
    def selects(self) -> bool:
        """Whether the layer has an indexer."""
        return self.selection == self.layer

    @property
    def makes_candidates(self) -> bool:
        """Whether its indexer makes the candidate pool."""
        return self.candidate_pool == self.layer

    @property
    def obeys_candidates(self) -> bool:
        """Whether its indexer stays inside the pool of an earlier layer."""
        return self.candidate_pool is not None and self.candidate_pool < self.layer


def layer_plan(config: DeepseekV41TextConfig, layer: int) -> LayerPlan:
    """Plan of a layer, which may lie beyond `num_hidden_layers` where the schedules do.

    Args:
        config: Uses attention, compress_ratios, kv_source_layer_ids, index_source_layer_ids, candidate_source_layer_id.
        layer: Zero-based, less than ``len(config.compress_ratios)``.
    """
    ratio = config.compress_ratios[layer] if config.attention == "csa2" else 0
    if ratio == 0:
        return LayerPlan(layer, 0, "dense" if config.attention == "full" else "window")
    keys = max(source for source in config.kv_source_layer_ids if source <= layer)
    selection = max(source for source in config.index_source_layer_ids if source <= layer)
    selects, pool = selection == layer, config.candidate_source_layer_id
    return LayerPlan(
        layer,
        ratio,
        role="Full" if keys == layer else "Reindex" if selects else "Reuse",
        compressed_kv=keys,
        index_keys=keys if selects else None,
        selection=selection,
        candidate_pool=pool if selects and 0 <= pool <= layer else None,
    )


def layer_plans(config: DeepseekV41TextConfig) -> list[LayerPlan]:
    """Plans of layers 0 to ``num_hidden_layers - 1``."""
    return [layer_plan(config, layer) for layer in config.layers]
