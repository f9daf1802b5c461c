"""Lightning indexer: selection of the compressed positions that each query attends to (ARCHITECTURE 5).

score[s, t] = sum_h w[s, h] * relu(q[s, h] . k[t]), over positions whose group has ended. The best `index_topk` are
kept. With a candidate source there are two levels: that layer also keeps the best blocks of positions, and every later
selection stays inside them.

`LearnedIndexer` is trained by distillation (DeepSeek-V3.2, section 2.1.1, on CSA2's compressed positions), since top-k
passes no gradient: for every query, its scores over the selected positions, as a softmax, are drawn to the attention's
probabilities of these positions, summed over heads and normalised (`ops/divergence.py`). Its inputs are detached, so
that loss reaches the indexer's weights only: those of the layer, and through the shared index keys `wk` and `k_norm` of
the layer's KV source. Gradients pass straight through the rounding of queries and keys. While warming up, training
attends to all visible positions, so that the target covers them all.

Shapes: B batch, S queries, T compressed positions, I index heads, E index_head_dim, K = min(index_topk, T),
N candidate blocks kept. Positions and blocks that do not exist are -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.ops.divergence import divergence
from dsv41.ops.norm import RMSNorm
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import rotate
from dsv41.ops.selection import (
    CHUNK_BYTES,
    GATHER_COST,
    mask_to_candidates,
    select_blocks,
    stable_topk,
    visible_positions,
)
from dsv41.schedule import layer_plan, layer_plans


class Indexer(nn.Module):
    """Indexer that scores and selects compressed positions; frozen, as in the release (`LearnedIndexer` is trained).

    Args:
        config: Uses hidden_size, q_lora_rank, head_dim, index_*, candidate_*, rms_norm_eps.
        layer_idx: Layer that owns the indexer (an index source).
    """

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.heads = config.index_n_heads
        self.width = config.index_head_dim
        self.topk = config.index_topk
        plan = layer_plan(config, layer_idx)
        self.ratio = plan.ratio
        self.quantized = config.quantized_caches
        self.block_size = config.candidate_block_size
        self.topk_blocks = config.candidate_topk_blocks
        self.makes_candidates, self.obeys_candidates = plan.makes_candidates, plan.obeys_candidates
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.wk = nn.Linear(config.head_dim, self.width, bias=False) if plan.makes_keys else None
        self.k_norm = RMSNorm(self.width, config.rms_norm_eps) if plan.makes_keys else None

    @property
    def learns(self) -> bool:
        """Whether the forward under way has to make a loss for the indexer."""
        return False

    def loss(self, x: Tensor, q_latent: Tensor, table: Tensor, keys: Tensor, selection: Tensor, mass: Tensor) -> Tensor:
        """Loss of a learned indexer; called only where `learns`."""
        raise TypeError("a frozen indexer has no loss")

    @torch.no_grad()
    def keys(self, latent: Tensor, table: Tensor) -> Tensor:
        """Index keys of a KV source, without a gradient.

        Args:
            latent: The compressor's latent [B, T, D], before rotation and quantisation.
            table: Rotations of the compressed positions, complex [T, rope / 2].

        Returns:
            [B, T, E], rotated and MXFP4-rounded.
        """
        return self._keys(latent, table)

    def _stored(self, x: Tensor) -> Tensor:
        """Index queries or keys after rounding to the cache format."""
        return fake_quantize(x, "mxfp4") if self.quantized else x

    def _keys(self, latent: Tensor, table: Tensor) -> Tensor:
        if self.wk is None or self.k_norm is None:
            raise TypeError("only the indexer of a KV source layer makes keys; the others are given its keys")
        return self._stored(rotate(self.k_norm(self.wk(latent)), table))

    def queries(self, x: Tensor, q_latent: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries and the weights of their heads.

        Args:
            x: Input of the attention site [B, S, H].
            q_latent: Query latent [B, S, q_lora_rank].
            table: Rotations of the queries, complex [S, rope / 2].

        Returns:
            Index queries [B, S, I, E], rotated and MXFP4-rounded, and the weights of their heads [B, S, I].
        """
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        q = self._stored(rotate(q, table))
        return q, self.weights_proj(x) * (self.width**-0.5 * self.heads**-0.5)

    def scores(self, q: Tensor, weights: Tensor, keys: Tensor, group_mask: Tensor, first_query: int = 0) -> Tensor:
        """Causal scores, before candidates: [B, S, T] with -inf at positions that a query cannot see.

        Args:
            q: Index queries [B, S, I, E].
            weights: Weights of their heads [B, S, I].
            keys: Shared index keys [B, T, E].
            group_mask: Valid compressed positions, bool [B, T].
            first_query: Position of the first query.
        """
        products = torch.einsum("bshe,bte->bsht", q, keys).relu_()
        scores = (products * weights.unsqueeze(-1)).sum(2)
        seen = visible_positions(q.shape[1], keys.shape[1], self.ratio, q.device, first_query)
        return scores.masked_fill(~(seen & group_mask.unsqueeze(1)), float("-inf"))

    def select_inside(
        self, q: Tensor, weights: Tensor, keys: Tensor, group_mask: Tensor, blocks: Tensor, first_query: int = 0
    ) -> Tensor:
        """Selection among candidate blocks [B, S, N], scoring no other position; the rest as in `scores`.

        Returns:
            int64 [B, S, min(K, N * block)], as of `stable_topk`.
        """
        batch, positions = keys.shape[:2]
        inside = blocks.unsqueeze(-1) * self.block_size + torch.arange(self.block_size, device=blocks.device)
        ended = (torch.arange(first_query, first_query + q.shape[1], device=q.device) + 1) // self.ratio
        exists = (blocks.unsqueeze(-1) >= 0) & (inside < ended.clamp_max(positions).view(1, -1, 1, 1))
        inside, exists = inside.flatten(2), exists.flatten(2)
        inside = inside.masked_fill(~exists, 0)
        flat = inside + torch.arange(batch, device=inside.device).view(-1, 1, 1) * positions
        products = torch.einsum("bshe,bsme->bshm", q, keys.flatten(0, 1)[flat]).relu_()
        scores = (products * weights.unsqueeze(-1)).sum(2)
        scores = scores.masked_fill(~(exists & group_mask.flatten()[flat]), float("-inf"))
        # Blocks ascend, so the order among candidates is that of the positions, also for ties.
        chosen = stable_topk(scores, self.topk)
        return inside.gather(-1, chosen.clamp_min(0)).masked_fill(chosen < 0, -1)

    @torch.no_grad()
    def forward(
        self, x: Tensor, q_latent: Tensor, keys: Tensor, table: Tensor, group_mask: Tensor, blocks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Selection of compressed positions, without a gradient.

        Queries are taken in chunks, so that products of all queries, heads and positions never exist together.

        Args:
            x, q_latent, table: See `queries`.
            keys, group_mask: See `scores`.
            blocks: Candidate blocks of an earlier candidate source [B, S, N], or None.

        Returns:
            Selected positions int64 [B, S, K], ascending, -1 where fewer exist; and the candidate blocks that hold
            for the layers after this one.
        """
        batch, length = x.shape[:2]
        positions = keys.shape[1]
        candidates = blocks if self.obeys_candidates else None
        q, weights = self.queries(x, q_latent, table)
        row = batch * self.heads * max(positions, 1) * keys.element_size()
        size = max(16, min(256, CHUNK_BYTES // row))
        selected, kept = [], []
        for start in range(0, length, size):
            stop = min(start + size, length)
            # Positions that no query of the chunk can see are not scored.
            seen = min(stop // self.ratio, positions)
            inputs = (q[:, start:stop], weights[:, start:stop], keys[:, :seen], group_mask[:, :seen])
            if candidates is not None and seen > GATHER_COST * candidates.shape[-1] * self.block_size:
                chosen = self.select_inside(*inputs, candidates[:, start:stop], start)
            else:
                scores = self.scores(*inputs, start)
                if self.makes_candidates:
                    kept.append(select_blocks(scores, self.ratio, self.block_size, self.topk_blocks, start))
                elif candidates is not None:
                    scores = mask_to_candidates(scores, candidates[:, start:stop], self.block_size)
                chosen = stable_topk(scores, self.topk)
            selected.append(chosen)
        if self.makes_candidates:
            blocks = _joined(kept, min(self.topk_blocks, -(-positions // self.block_size)))
        return _joined(selected, min(self.topk, positions)), blocks


def _joined(parts: list[Tensor], count: int) -> Tensor:
    """Chunks [B, c, up to `count`] of indices as one [B, S, count], filled up with -1."""
    return torch.cat([F.pad(part, (0, count - part.shape[-1]), value=-1) for part in parts], dim=1)


class LearnedIndexer(Indexer):
    """Indexer trained by distillation, in training mode with gradients; elsewhere equal to the frozen one.

    Attributes:
        warming_up: Attend to all visible positions in training. Set by the training code.
    """

    warming_up = False

    @property
    def learns(self) -> bool:
        """Whether the forward under way has to make a loss for the indexer."""
        return self.training and torch.is_grad_enabled()

    def keys(self, latent: Tensor, table: Tensor) -> Tensor:
        """Index keys as of `Indexer.keys`, with a gradient for the indexer's weights."""
        return self._keys(latent.detach(), table)

    @torch.no_grad()
    def forward(
        self, x: Tensor, q_latent: Tensor, keys: Tensor, table: Tensor, group_mask: Tensor, blocks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Selection as of `Indexer.forward`; while warming up, in training, all visible positions [B, S, T]."""
        if not (self.warming_up and self.training):
            return super().forward(x, q_latent, keys, table, group_mask, blocks)
        positions = keys.shape[1]
        exists = visible_positions(x.shape[1], positions, self.ratio, x.device) & group_mask.unsqueeze(1)
        return torch.arange(positions, device=x.device).masked_fill(~exists, -1), blocks

    def loss(self, x: Tensor, q_latent: Tensor, table: Tensor, keys: Tensor, selection: Tensor, mass: Tensor) -> Tensor:
        """KL divergence of this indexer's scores from the attention's probabilities of the selection.

        Args:
            x, q_latent, table: See `queries`; no gradient flows into them.
            keys: Index keys of the layer's KV source [B, T, E].
            selection, mass: See `divergence`.

        Returns:
            Scalar, summed over live queries.
        """
        q, weights = self.queries(x.detach(), q_latent.detach(), table)
        return divergence(q, weights, keys, selection, mass, self.ratio)


def learns_selection(config: DeepseekV41TextConfig) -> bool:
    """Whether a configuration has a learned indexer."""
    return config.indexer == "learned" and any(plan.selects for plan in layer_plans(config))


def build_indexer(config: DeepseekV41TextConfig, layer_idx: int) -> Indexer:
    """Indexer of an index source layer, named by ``config.indexer``."""
    kinds = {"frozen": Indexer, "learned": LearnedIndexer}
    return kinds[config.indexer](config, layer_idx)
