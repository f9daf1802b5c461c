"""Ranks: the rows of a tensor that this process holds, and work that all ranks do or none.

One layout is used throughout: the first dimension cut like ``torch.chunk`` and DTensor's ``Shard(0)``, ceil(N / W) rows
per rank, the last ranks fewer or none. No padding rows exist, so that the global shape is the logical one on any number
of ranks. Everything else is a tensor that is held whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

T = TypeVar("T")


def owned_rows(rows: int, world_size: int, rank: int) -> range:
    """Rows of `rows` that `rank` of `world_size` owns."""
    share = -(-rows // world_size)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The part of `tensor` that this process holds, as a plain tensor that shares its memory, and its first row.

    Raises:
        NotImplementedError: A DTensor with another placement than ``Shard(0)`` over one mesh dimension.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0
    if tensor.placements != (Shard(0),):
        raise NotImplementedError(f"only Shard(0) over one mesh dimension is supported, got {tensor.placements}")
    mesh = tensor.device_mesh
    return tensor.to_local(), owned_rows(tensor.shape[0], mesh.size(), mesh.get_local_rank()).start


@torch.no_grad()
def copy_rows_(tensor: Tensor, values: Tensor) -> None:
    """Copy into `tensor`, which may be sharded, its own rows of the whole `values`, without communication."""
    local, first = local_rows(tensor)
    local.copy_(values[first : first + len(local)] if isinstance(tensor, DTensor) else values)


class OtherRankError(ValueError):
    """Raised on the ranks that did not fail themselves, so that all stop alike."""


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank of `group`; if it fails on one, all raise.

    Args:
        work: Must not communicate: a rank that has failed would be missed.
        group: None runs it here alone.

    Raises:
        Exception: What `work` raised here.
        OtherRankError: It failed elsewhere only; the message says where and why.
    """
    if group is None or dist.get_world_size(group) == 1:
        return work()
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, None if failure is None else str(failure), group)
    if failure is not None:
        raise failure
    elsewhere = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if elsewhere:
        raise OtherRankError("; ".join(elsewhere))
    return result  # type: ignore[return-value]
