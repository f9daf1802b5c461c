"""The Engram table: rows that hash ids point at, held whole or split over ranks.

With a process group of W ranks, rank r owns the rows of DTensor's own uneven ``Shard(0)`` layout (see `sharding.py`):
no padding rows exist, and no rank ever holds the whole table. A lookup is an exchange:

    ids -> sorted distinct ids (so they are grouped by owner) --all-to-all--> owners
    owners read their rows                                     --all-to-all--> rows -> back into the order of the ids

Backward runs the same exchange in reverse: each owner gets the sum over ranks of the gradients of its rows. Since every
rank's loss is a mean over its own tokens and the other parameters' gradients are averaged over ranks, that sum is
divided by W, once, in the exchange's backward: before clipping, and where no ``to_empty`` or cast can lose it.

Every rank takes part in every exchange, with zero ids too. Shapes: N rows, D width, R distinct ids asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dsv41.engram_hash import check_integer_ids
from dsv41.initialization import NamedDraws
from dsv41.sharding import owned_rows


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class _RowExchange(torch.autograd.Function):
    """Rows from their owners to those who asked; gradients back to the owners, divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.exchange = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.exchange
        return _all_to_all(gradients[0], receive, send, group) / dist.get_world_size(group), None, None, None


class EngramTable(nn.Module):
    """Rows [N, D] addressed by int64 hash ids.

    Args:
        rows: Number N of rows.
        width: Channels D of a row.
        std: Standard deviation of fresh rows.
        strict_validation: Check ids on the host; see `check_integer_ids`.
        process_group: Ranks that share the rows; None holds the whole table here.

    Attributes:
        weight: [N, D], or this rank's rows of it; after `shard` a DTensor [N, D].
    """

    def __init__(
        self,
        rows: int,
        width: int,
        std: float,
        strict_validation: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.std = std
        self.strict_validation = strict_validation
        self._set_owners(process_group)
        self.weight = nn.Parameter(torch.empty(len(self.owned), width))
        self.init_weights(NamedDraws())

    def _set_owners(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.owned = owned_rows(
            self.rows, self.world_size, 0 if process_group is None else dist.get_rank(process_group)
        )

    def init_weights(self, draws: NamedDraws) -> None:
        """Draw the rows, in blocks; each row gets the same value whoever owns it."""
        draws.normal_rows_(self._local(), "weight", self.std, first_row=self.owned.start)

    def _local(self) -> Tensor:
        """This rank's rows as a plain tensor; gradients flow into the parameter."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight

    def shard(self, mesh: DeviceMesh) -> nn.Parameter:
        """Turn the weight into a DTensor over `mesh`, which has to be the mesh of the other parameters.

        A table without a process group is cut: each rank of the mesh keeps its rows, and the mesh's group looks up.
        Built on the meta device, the whole table never takes memory.

        Args:
            mesh: One-dimensional; its ranks in their order are those of the process group, if there is one.

        Returns:
            The new parameter, to be handed to ``fully_shard`` as ignored. Calling again with the same mesh returns it.

        Raises:
            ValueError: The mesh has other ranks, another order or another number of dimensions.
        """
        ranks = mesh.mesh.flatten().tolist()
        owners = ranks if self.process_group is None else dist.get_process_group_ranks(self.process_group)
        if isinstance(self.weight, DTensor):
            owners = self.weight.device_mesh.mesh.flatten().tolist()
        if mesh.ndim != 1 or ranks != owners:
            raise ValueError(
                f"mesh: must be one-dimensional over the owners of the table, ranks {owners}, got {mesh.mesh.tolist()}"
            )
        if not isinstance(self.weight, DTensor):
            local = self.weight.detach()
            if self.process_group is None and len(ranks) > 1:
                self._set_owners(mesh.get_group())
                # A copy, or the slice would keep the whole table alive.
                local = local[self.owned.start : self.owned.stop].clone()
            width = local.shape[1]
            # Shape and stride are given: from uneven shards each rank would infer another global shape.
            sharded = DTensor.from_local(
                local,
                mesh,
                (Shard(0),),
                run_check=False,
                shape=torch.Size((self.rows, width)),
                stride=(width, 1),
            )
            self.weight = nn.Parameter(sharded, requires_grad=self.weight.requires_grad)
        return self.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids`, any shape, int32 or int64. With a process group, every rank has to call this.

        Returns:
            Rows [*ids.shape, D] in the table's dtype.

        Raises:
            ValueError: An id is outside 0 to N - 1. With a process group all ranks raise, naming the rank that asked.
        """
        if self.process_group is None:
            check_integer_ids(ids, "hash ids", self.rows, self.strict_validation)
            return F.embedding(ids, self._local())
        self._check_on_all_ranks(ids, self.process_group)
        return self._exchange(ids.long(), self.process_group)

    def _check_on_all_ranks(self, ids: Tensor, group: dist.ProcessGroup) -> None:
        # The choice depends on the device and the flag only, so that all ranks take the same path.
        if ids.is_cuda and not self.strict_validation:
            check_integer_ids(ids, "hash ids", self.rows, strict=False)
            return
        complaint: str | None = None
        try:
            check_integer_ids(ids, "hash ids", self.rows, strict=True)
        except ValueError as error:
            complaint = f"{error} (asked for by rank {dist.get_rank(group)})"
        bad = torch.tensor([complaint is not None], dtype=torch.int32, device=ids.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group)
        if bad.item():
            complaints: list[str | None] = [None] * self.world_size
            dist.all_gather_object(complaints, complaint, group)
            raise ValueError("; ".join(filter(None, complaints)))

    def _exchange(self, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
        distinct, order = ids.flatten().unique(return_inverse=True)
        bounds = torch.tensor(
            [owned_rows(self.rows, self.world_size, rank).stop for rank in range(self.world_size)],
            device=ids.device,
        )
        ends = torch.searchsorted(distinct, bounds)
        asked = ends.diff(prepend=ends.new_zeros(1))
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked, group=group)
        ask, serve = asked.tolist(), wanted.tolist()
        requests = _all_to_all(distinct, ask, serve, group)
        rows = self._local().index_select(0, requests - self.owned.start)
        answers = _RowExchange.apply(rows, serve, ask, group)
        return answers.index_select(0, order.flatten()).view(*ids.shape, answers.shape[1])
