"""The lightning indexer: which compressed positions each query attends to (ARCHITECTURE 5).

score[s, t] = sum_h w[s, h] * relu(q[s, h] . k[t]), over positions whose group has ended. The best `index_topk` are
kept. With a candidate source there are two levels: that layer also keeps the best blocks of positions, and every later
selection stays inside them.

Top-k is made deterministic: equal scores go to the lower position, whatever lies behind the query. torch.topk leaves
that open, and its choice can depend on the length of the row, that is, on the future.

Shapes: B batch, S queries, T compressed positions, I index heads, E index_head_dim, K = min(index_topk, T),
N candidate blocks kept. Positions and blocks that do not exist are -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.config import DeepseekV41TextConfig
from dsv41.norm import RMSNorm
from dsv41.quantization import fake_quantize
from dsv41.rope import rotate


def stable_topk(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest finite scores in the last axis, ties to the lower index.

    Args:
        scores: Floating [..., T]; -inf marks absent entries. Compared in fp32.
        count: At most this many are returned.

    Returns:
        int64 [..., min(count, T)], ascending, -1 where fewer exist (all -1 stand last).
    """
    length = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0: they are equal scores
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, ordered like the floats
    index = torch.arange(length, device=scores.device)
    # One integer holds score and position, so no two are equal and any top-k gives the same set.
    keys = (ordered.long() << 32) | (0xFFFFFFFF - index)
    chosen = keys.topk(min(count, length), dim=-1, sorted=False).indices
    exists = scores.gather(-1, chosen) > float("-inf")
    chosen = chosen.masked_fill(~exists, length).sort(dim=-1).values
    return chosen.masked_fill(chosen == length, -1)


def membership(indices: Tensor, length: int) -> Tensor:
    """Bool mask [..., length] that is true at the non-negative `indices` int64 [..., K]."""
    mask = torch.zeros(*indices.shape[:-1], length + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices.masked_fill(indices < 0, length), True)[..., :length]


def visible_positions(queries: int, positions: int, ratio: int, device: torch.device, first_query: int = 0) -> Tensor:
    """Causality over compressed positions: bool [S, T], true where group t has ended by query `first_query` + s."""
    ended = (torch.arange(first_query, first_query + queries, device=device) + 1) // ratio
    return torch.arange(positions, device=device) < ended.unsqueeze(-1)


def select_blocks(scores: Tensor, ratio: int, block_size: int, count: int, first_query: int = 0) -> Tensor:
    """First level of the selection: the candidate blocks of every query.

    Args:
        scores: [B, S, T], -inf where invisible.
        ratio: Tokens per compressed position.
        block_size: Positions per block.
        count: Blocks to keep; the block of the query's newest visible position is always one of them.
        first_query: Position of the first query.

    Returns:
        int64 block ids [B, S, N], ascending, -1 where fewer exist.
    """
    queries, positions = scores.shape[1:]
    padded = F.pad(scores, (0, -positions % block_size), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    if best.shape[-1] == 0:
        return scores.new_empty(*scores.shape[:2], 0, dtype=torch.long)
    newest = (torch.arange(first_query, first_query + queries, device=scores.device) + 1) // ratio - 1
    forced = torch.arange(best.shape[-1], device=scores.device) == (newest // block_size).unsqueeze(-1)
    exists = best > float("-inf")
    return stable_topk(best.masked_fill(forced & exists, float("inf")), count)


def mask_to_candidates(scores: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """`scores` [B, S, T] with -inf outside the candidate `blocks` [B, S, N]."""
    positions = scores.shape[-1]
    allowed = membership(blocks, -(-positions // block_size))
    allowed = allowed.repeat_interleave(block_size, dim=-1)[..., :positions]
    return scores.masked_fill(~allowed, float("-inf"))


# Of the products of all index heads at a time: queries are taken in chunks of as many as fit.
CHUNK_BYTES = 16 << 20
# Gathering keys costs more per key than scoring all of them in one product.
GATHER_COST = 4


class Indexer(nn.Module):
    """Scores compressed positions and selects; frozen, like the release (`indexer_learning.py` has one that learns).

    Args:
        config: Uses hidden_size, q_lora_rank, head_dim, index_*, candidate_*, rms_norm_eps.
        layer_idx: Layer that owns the indexer (an index source).
    """

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.heads = config.index_n_heads
        self.width = config.index_head_dim
        self.topk = config.index_topk
        self.ratio = config.compress_ratios[layer_idx]
        self.quantized = config.quantized_caches
        self.block_size = config.candidate_block_size
        self.topk_blocks = config.candidate_topk_blocks
        source = config.candidate_source_layer_id
        self.makes_candidates = layer_idx == source
        self.obeys_candidates = 0 <= source < layer_idx
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        owns_keys = layer_idx in config.kv_source_layer_ids
        self.wk = nn.Linear(config.head_dim, self.width, bias=False) if owns_keys else None
        self.k_norm = RMSNorm(self.width, config.rms_norm_eps) if owns_keys else None

    @property
    def learns(self) -> bool:
        """Whether the forward under way has to make a loss for the indexer."""
        return False

    def loss(self, x: Tensor, q_latent: Tensor, table: Tensor, keys: Tensor, selection: Tensor, mass: Tensor) -> Tensor:
        """What a learned indexer learns from; asked for only where `learns`."""
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
        """Index queries or keys as a cache would give them back."""
        return fake_quantize(x, "mxfp4") if self.quantized else x

    def _keys(self, latent: Tensor, table: Tensor) -> Tensor:
        if self.wk is None or self.k_norm is None:
            raise TypeError("only the indexer of a KV source layer makes keys; the others are given its keys")
        return self._stored(rotate(self.k_norm(self.wk(latent)), table))

    def queries(self, x: Tensor, q_latent: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """What scores positions.

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
            weights: Of their heads [B, S, I].
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
        """The selection among candidate blocks [B, S, N], scoring no other position; the rest as in `scores`.

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
        """Select; top-k passes no gradient, so nothing here does.

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
            # What no query of the chunk can see is not scored.
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
