"""Work that all ranks of a group do or none: if one fails, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


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
