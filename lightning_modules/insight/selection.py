"""How much of what attention would look at does the indexer's selection keep?"""

from __future__ import annotations

from functools import partial

import lightning.pytorch as L
import torch
from torch import Tensor

from dsv41.attention import AttentionCore
from dsv41.model import DeepseekV41Block
from dsv41.ops.selection import visible_positions
from lightning_modules.insight.hooks import ValidationObserver, log, over_ranks

# Sums over queries: what the selection keeps, what an even spread or the best selection would keep, and how many.
_KEPT, _EVEN, _BEST, _QUERIES = range(4)


@torch.no_grad()
def visible_mass(core: AttentionCore, q: Tensor, kv: Tensor, compressed: Tensor, token_mask: Tensor) -> Tensor:
    """What each compressed position would be worth to a query that attended to all it can see.

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


class IndexerRecall(ValidationObserver):
    """Logs the mean `selection_recall` over the first batches of every validation.

    ``val/indexer_recall`` is the mean over layers that select, ``indexer_recall/layer_N`` each of them;
    ``val/indexer_recall_chance`` and ``val/indexer_recall_best`` are what chance and the best selection of that size
    would reach. Nothing is logged where no query has a choice.

    Args:
        batches: Validation batches that are looked at; 0 switches it off. Each costs an attention over all visible
            positions in every layer that selects.
    """

    def __init__(self, batches: int = 2) -> None:
        super().__init__(batches)
        self._sums: dict[int, Tensor] = {}

    def listen(self, pl_module: L.LightningModule) -> None:
        """See what the attention of layers that select is given."""
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
            log(pl_module, "val/indexer_recall", means[_KEPT])
            log(pl_module, "val/indexer_recall_chance", means[_EVEN])
            log(pl_module, "val/indexer_recall_best", means[_BEST])
