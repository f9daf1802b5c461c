"""Selection of compressed positions: stable top-k, visibility, candidate blocks (ARCHITECTURE 5).

Top-k is made deterministic: equal scores go to the lower position, whatever lies behind the query. torch.topk leaves
that open, and its choice can depend on the length of the row, that is, on the future.

Shapes: B batch, S queries, T compressed positions, K = min(index_topk, T), N candidate blocks kept. Positions and
blocks that do not exist are -1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Size of the products of all index heads at a time; a chunk has as many queries as fit.
CHUNK_BYTES = 16 << 20
# Gathering keys costs more per key than scoring all of them in one product.
GATHER_COST = 4


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
