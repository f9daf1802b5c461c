"""Engram tables whose rows are owned by ranks, against a dense table: values, gradients, errors, a whole model."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from golden_tiny import build
from ranks import ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dsv41.engram.table import EngramTable
from dsv41.ranks import owned_rows

ROWS, WIDTH = 1013, 5  # a prime: no number of ranks divides it


def make(rows: int = ROWS, dtype: torch.dtype = torch.float64, sharded: bool = True) -> EngramTable:
    torch.manual_seed(7)
    group = dist.group.WORLD if sharded else None
    return EngramTable(rows, WIDTH, std=0.5, process_group=group).to(dtype)


def request(case: str, rank: int, rows: int) -> Tensor:
    """Ids that one rank asks for; every rank can compute those of the others."""
    generator = torch.Generator().manual_seed(100 + rank)
    if case == "empty everywhere" or (case == "empty on one rank" and rank == 1):
        return torch.empty(0, 3, dtype=torch.int64)
    if case == "all on one owner":
        return torch.randint(0, min(4, rows), (6, 2), generator=generator)
    if case == "the last row many times":
        return torch.full((9,), rows - 1)
    if case == "repeated":
        return torch.randint(0, rows, (3, 1), generator=generator).expand(3, 8).contiguous()
    # Rows of different length per rank.
    return torch.randint(0, rows, (4 + 3 * rank, 2, 3), generator=generator)


CASES = ("random", "repeated", "all on one owner", "the last row many times", "empty on one rank", "empty everywhere")


def own_rows(dense: Tensor, table: EngramTable) -> Tensor:
    return dense[table.owned.start : table.owned.stop]


def weights_for(ids: Tensor, rank: int) -> Tensor:
    """Coefficients of a loss that differ by rank, position and channel."""
    shape = (*ids.shape, WIDTH)
    return torch.arange(1, ids.numel() * WIDTH + 1, dtype=torch.float64).view(shape).sin() * (rank + 1)


def loss_of(out: Tensor, ids: Tensor, rank: int) -> Tensor:
    """A mean over the rank's own tokens, as in training."""
    return (out * weights_for(ids, rank)).sum() / max(ids.numel(), 1)


def dense_gradient(case: str, rows: int) -> Tensor:
    """Gradient of the mean over ranks of their losses, by one process that holds the table."""
    table = make(rows, sharded=False)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(dist.get_world_size()):
        ids = request(case, rank, rows)
        total = total + loss_of(table.weight[ids], ids, rank) / dist.get_world_size()
    total.backward()
    return table.weight.grad if table.weight.grad is not None else torch.zeros_like(table.weight)


@ranks(2, 3)
def test_initial_rows() -> None:
    """A row starts with the same value on any owner."""
    for rows in (ROWS, 2, 5000):
        table, dense = make(rows), make(rows, sharded=False)
        assert len(table.weight) == len(table.owned)
        assert torch.equal(table.weight, own_rows(dense.weight, table))


@ranks(2, 3)
def test_forward(rank: int) -> None:
    """Bit-equal to indexing, for every kind of request, table size and dtype."""
    for rows in (ROWS, 2):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            table, dense = make(rows, dtype), make(rows, dtype, sharded=False)
            for case in CASES:
                for id_type in (torch.int64, torch.int32):
                    ids = request(case, rank, rows).to(id_type)
                    out = table(ids)
                    assert out.shape == (*ids.shape, WIDTH)
                    assert out.dtype == dtype
                    assert torch.equal(out, dense.weight[ids.long()]), (case, rows)


def error(gradient: Tensor, expected: Tensor) -> float:
    """Largest deviation of an owner's rows, of which there may be none."""
    return float((gradient - expected).abs().max()) if len(expected) else 0.0


@ranks(2, 3)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradient(rank: int, recompute: bool) -> None:
    """Owners get the gradient of the mean loss: divided by the number of ranks exactly once.

    The same when the lookup runs again in the backward pass.
    """
    for rows in (ROWS, 2):
        for case in CASES:
            table = make(rows)
            ids = request(case, rank, rows)
            out = checkpoint(table, ids, use_reentrant=False) if recompute else table(ids)
            loss_of(out, ids, rank).backward()
            assert table.weight.grad is not None
            assert error(table.weight.grad, own_rows(dense_gradient(case, rows), table)) <= 1e-14, (case, rows)


@ranks(2, 3)
def test_accumulated_gradient(rank: int) -> None:
    """Two backward passes add up; an earlier one is not divided again."""
    table = make()
    for case in ("random", "repeated"):
        ids = request(case, rank, ROWS)
        loss_of(table(ids), ids, rank).backward()
    expected = own_rows(dense_gradient("random", ROWS) + dense_gradient("repeated", ROWS), table)
    assert table.weight.grad is not None
    assert error(table.weight.grad, expected) <= 1e-14


@ranks(2, 3)
def test_sparse_gradient(mesh: DeviceMesh, rank: int) -> None:
    """A row-sparse gradient, of a plain weight and of a DTensor, after one pass, after two and with recomputation.

    Of a DTensor, every rank's gradient has the global shape and this rank's rows alone.
    """
    for rows in (ROWS, 2):
        for case in CASES:
            expected = dense_gradient(case, rows)
            for as_dtensor in (False, True):
                table = make(rows)
                table.sparse_gradient = True
                if as_dtensor:
                    table.shard(mesh)
                ids = request(case, rank, rows)
                for passes, lookup in ((1, table), (2, lambda i, t=table: checkpoint(t, i, use_reentrant=False))):
                    out = lookup(ids)
                    assert torch.equal(out, make(rows, sharded=False).weight[ids])
                    loss_of(out, ids, rank).backward()
                    gradient = table.weight.grad
                    assert gradient is not None
                    assert gradient.layout == torch.sparse_coo
                    assert not isinstance(gradient, DTensor)
                    assert gradient.shape == table.weight.shape
                    ours = gradient.to_dense()
                    if as_dtensor:
                        assert set(gradient.coalesce().indices()[0].tolist()) <= set(table.owned)
                        ours = own_rows(ours, table)
                    assert error(ours, passes * own_rows(expected, table)) <= 1e-14, (case, rows, passes)


@ranks(2, 3)
def test_sparse_gradient_under_fsdp(mesh: DeviceMesh, rank: int) -> None:
    """The table as a parameter that FSDP2 ignores, in a unit whose other parameters it shards."""
    table, projection = make(), torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    table.sparse_gradient = True
    torch.nn.init.eye_(projection.weight)
    module = torch.nn.Sequential(table, projection)
    fully_shard(module, mesh=mesh, ignored_params={table.shard(mesh)})
    ids = request("random", rank, ROWS)
    for _ in range(2):
        loss_of(module(ids), ids, rank).backward()
    assert isinstance(projection.weight.grad, DTensor)
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.layout == torch.sparse_coo
    difference = own_rows(gradient.to_dense() - 2 * dense_gradient("random", ROWS), table)
    assert difference.abs().max() <= 1e-14


@ranks(2, 3)
def test_frozen(rank: int) -> None:
    """A frozen table answers, and no gradient exchange is started."""
    table = make()
    table.weight.requires_grad_(False)
    ids = request("random", rank, ROWS)
    out = table(ids)
    assert not out.requires_grad
    assert torch.equal(out, make(sharded=False).weight[ids])


@ranks(2, 3)
def test_bad_id(rank: int, world_size: int) -> None:
    """All ranks raise alike when one asks for a row that does not exist, and the table works afterwards."""
    table, culprit = make(), world_size - 1
    for bad in (-1, ROWS, 2**40):
        ids = request("random", rank, ROWS)
        if rank == culprit:
            ids = ids.clone()
            ids.view(-1)[2] = bad
        expected = f"hash ids: ids must lie in 0..{ROWS - 1}, got {bad} (asked for by rank {culprit})"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            table(ids)
    ids = request("random", rank, ROWS)
    assert torch.equal(table(ids), make(sharded=False).weight[ids])


@ranks(2, 3)
def test_dtensor(mesh: DeviceMesh, rank: int, world_size: int) -> None:
    """As a DTensor on the mesh: logical shape, same rows, same gradient; other meshes are refused."""
    world = list(range(world_size))
    table = make()
    parameter = table.shard(mesh)
    assert isinstance(parameter, DTensor)
    assert parameter.shape == (ROWS, WIDTH)
    assert table.shard(mesh) is parameter
    assert [name for name, _ in table.named_parameters()] == ["weight"]
    dense = make(sharded=False)
    assert torch.equal(parameter.full_tensor(), dense.weight)
    ids = request("random", rank, ROWS)
    out = table(ids)
    assert torch.equal(out, dense.weight[ids])
    loss_of(out, ids, rank).backward()
    expected = dense_gradient("random", ROWS)
    assert isinstance(parameter.grad, DTensor)
    assert (parameter.grad.full_tensor() - expected).abs().max() <= 1e-14
    torch.optim.SGD([parameter], lr=0.5).step()
    assert (parameter.full_tensor() - (dense.weight - 0.5 * expected)).detach().abs().max() <= 1e-14
    for other in (DeviceMesh("cpu", world[::-1]), DeviceMesh("cpu", [world])):
        with pytest.raises(ValueError, match=r"^mesh: must be one-dimensional over the owners"):
            make().shard(other)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of one rank; n-grams repeat within and across ranks, live labels differ in number."""
    generator = torch.Generator().manual_seed(rank // 2)
    ids = torch.randint(3, 60, (2, 10 + rank), generator=generator)
    ids[1, 4:8] = ids[0, 1:5]
    labels = ids.clone()
    labels[0, : 2 + 3 * rank] = -100
    return ids, labels


@ranks(2, 3)
def test_model(mesh: DeviceMesh, rank: int, world_size: int) -> None:
    """A whole model in float64: every parameter's gradient against one process, relative to its norm."""
    model, dense = build(seed=3, group=dist.group.WORLD), build(seed=3)
    ids, labels = batch(rank)
    model(ids, labels=labels).loss.backward()
    losses = [dense(*batch(r)[:1], labels=batch(r)[1]).loss for r in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()
    oracle = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        expected = oracle[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is None or expected is None:
            continue
        ours = parameter.grad
        if name.endswith("engram.embed.weight"):
            table = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(table, EngramTable)
            expected_here = own_rows(expected, table)
        else:
            dist.all_reduce(ours)
            ours, expected_here = ours / world_size, expected
        assert (ours - expected_here).norm() / expected.norm() <= 1e-12, name
    tables = model.prepare_model_owned_dtensors(mesh)
    assert {tuple(parameter.shape) for parameter in tables} == {(408, 16), (484, 16)}
    assert tables < set(model.parameters())


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 1013])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_split_is_that_of_torch_chunk(rows: int, world_size: int) -> None:
    chunks = torch.arange(rows).chunk(world_size)
    for rank in range(world_size):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(owned_rows(rows, world_size, rank)) == expected


def test_the_split_holds_beyond_32_bits() -> None:
    """The released table times 16: more rows than an int32 can count, without allocating any."""
    rows, world_size = 384_006_168 * 16, 96
    ranges = [owned_rows(rows, world_size, rank) for rank in range(world_size)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == rows
    assert all(before.stop == after.start for before, after in itertools.pairwise(ranges))
    assert max(map(len, ranges)) - min(map(len, ranges)) < world_size
    assert rows > 2**31
    id_near_the_end = torch.tensor([rows - 1, 2**31 + 5])
    bounds = torch.tensor([part.stop for part in ranges])
    owners = torch.searchsorted(bounds, id_near_the_end, right=True).tolist()
    assert owners == [world_size - 1, (2**31 + 5) // len(ranges[0])]
