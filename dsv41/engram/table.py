"""Engram table: rows addressed by hash ids, held whole or split over ranks.

With a process group of W ranks, rank r owns the rows of DTensor's uneven ``Shard(0)`` layout (see `dsv41/ranks.py`):
no padding rows exist, and no rank ever holds the whole table. A lookup is an exchange:

    ids -> sorted distinct ids (so they are grouped by owner) --all-to-all--> owners
    owners read their rows                                     --all-to-all--> rows -> back into the order of the ids

Backward runs the same exchange in reverse: each owner gets the sum over ranks of the gradients of its rows. Since every
rank's loss is a mean over its own tokens and the other parameters' gradients are averaged over ranks, that sum is
divided by W, once, in the exchange's backward: before clipping, and where no ``to_empty`` or cast can lose it.

Every rank takes part in every exchange, with zero ids too. An exchange waits for the device twice, since messages are
sized on the host: for the number of distinct ids, and for how many each owner has to serve. A lookup in a whole table
never waits (checking ids on the host apart, see `check_integer_ids`), and removes no repetitions: that costs more than
it saves where no rows are sent.

A step reads a few thousand rows of millions, but a gradient of the table's shape is mostly zeros that are written, and
read again by clipping and optimizer. On request it is row-sparse instead: see `EngramTable.sparse_gradient`.

Shapes: N rows, D width, R distinct ids asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dsv41.initialization import NamedDraws
from dsv41.inputs import check_integer_ids
from dsv41.ranks import local_rows, owned_rows


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class _RowExchange(torch.autograd.Function):
    """Exchange of rows from owners to requesters; gradients return to the owners, divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.exchange = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.exchange
        return _all_to_all(gradients[0], receive, send, group) / dist.get_world_size(group), None, None, None


class _ReadRows(torch.autograd.Function):
    """Embedding lookup in the rows held here whose gradient consists of the rows read.

    For a plain weight ``F.embedding(sparse=True)`` does the same, but no sparse gradient passes ``DTensor.to_local``.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        local, ctx.first = local_rows(weight)
        ctx.shape = weight.shape
        ctx.save_for_backward(ids)
        return F.embedding(ids, local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        rows = ctx.saved_tensors[0].reshape(1, -1).long() + ctx.first
        values = gradients[0].reshape(rows.shape[1], ctx.shape[1])
        # Unchecked: the forward has looked these ids up.
        return torch.sparse_coo_tensor(rows, values, ctx.shape, check_invariants=False), None


class EngramTable(nn.Module):
    """Table of rows [N, D] addressed by int64 hash ids.

    Args:
        rows: Number N of rows.
        width: Channels D of a row.
        std: Standard deviation of fresh rows.
        strict_validation: Check ids on the host; see `check_integer_ids`.
        process_group: Ranks that share the rows; None holds the whole table here.
        sparse_gradient: Make the weight's gradient row-sparse, for an optimizer that takes one.

    Attributes:
        weight: [N, D], or this rank's rows of it; after `shard` a DTensor [N, D].
        sparse_gradient: If true, ``weight.grad`` is a sparse COO tensor of the weight's shape with an entry per row
            read, and nothing of the table's size is allocated. It is not coalesced: a row that was read twice has two
            entries, which add up to its dense gradient. A DTensor's is a plain tensor too, and holds this rank's rows
            under their numbers in the whole table. To be changed only while the weight has no gradient.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        std: float,
        strict_validation: bool = True,
        process_group: dist.ProcessGroup | None = None,
        sparse_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.std = std
        self.strict_validation = strict_validation
        self.sparse_gradient = sparse_gradient
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
        """Draw the rows, in blocks; a row's value does not depend on its owner."""
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
            return self._read(ids)
        self._check_on_all_ranks(ids, self.process_group)
        return self._exchange(ids.long(), self.process_group)

    def _read(self, ids: Tensor) -> Tensor:
        """Rows that this rank holds, by ids that count from the first of them."""
        if self.sparse_gradient:
            return _ReadRows.apply(self.weight, ids)
        return F.embedding(ids, self._local())

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
        bounds = torch.tensor([owned_rows(self.rows, self.world_size, rank).stop for rank in range(self.world_size)])
        ends = torch.searchsorted(distinct, bounds.to(ids.device, non_blocking=True))
        asked = ends.diff(prepend=ends.new_zeros(1))
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked, group=group)
        ask, serve = torch.stack((asked, wanted)).tolist()
        requests = _all_to_all(distinct, ask, serve, group)
        answers = _RowExchange.apply(self._read(requests - self.owned.start), serve, ask, group)
        return answers.index_select(0, order.flatten()).view(*ids.shape, answers.shape[1])
