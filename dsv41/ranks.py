"""Ranks: rows of a tensor that this process holds, and work that succeeds on all ranks or on none.

One layout is used throughout: the first dimension cut like ``torch.chunk`` and DTensor's ``Shard(0)``, ceil(N / W) rows
per rank, the last ranks fewer or none. No padding rows exist, so that the global shape is the logical one on any number
of ranks. All other tensors are held whole.
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
    """Range of the `rows` rows that `rank` of `world_size` owns."""
    share = -(-rows // world_size)
    return range(min(rank * share, rows), min((rank + 1) * share, rows))


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Part of `tensor` that this process holds, as a plain tensor that shares its memory, and its first row.

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
    """Copy the rows that `tensor` holds, which may be sharded, from the whole `values`, without communication."""
    local, first = local_rows(tensor)
    local.copy_(values[first : first + len(local)] if isinstance(tensor, DTensor) else values)


class OtherRankError(ValueError):
    """Failure on another rank, raised so that all ranks stop."""


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on every rank of `group`; if it fails on one, all raise.

    Args:
        work: Must not communicate: a failed rank would not take part.
        group: None runs it here alone.

    Raises:
        Exception: `work` failed on this rank.
        OtherRankError: `work` failed on other ranks only; the message names them and the reason.
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
