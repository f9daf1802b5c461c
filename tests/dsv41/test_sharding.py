"""Rows of plain tensors and of DTensors, on every rank of worlds that exist in this process only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

from dsv41.ranks import copy_rows_, local_rows, owned_rows

# Rows and ranks: even, the last rank with fewer, ranks with none, fewer rows than ranks, one rank.
LAYOUTS = [(6, 3), (7, 3), (9, 4), (5, 4), (1, 3), (2, 5), (4, 1)]


@pytest.fixture
def be_rank() -> Iterator[Callable[..., DeviceMesh]]:
    """Become a rank of a world without other processes: ``be_rank(rank, world_size)``. Nothing can be sent in it."""
    assert not dist.is_initialized()

    def become(rank: int, world_size: int, shape: tuple[int, ...] | None = None) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return init_device_mesh("cpu", shape or (world_size,))

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(rows: int) -> Tensor:
    return torch.arange(rows * 2.0).view(rows, 2)


@pytest.mark.parametrize(("rows", "world_size"), [*LAYOUTS, (0, 2)])
def test_ranks_own_the_chunks_of_torch_in_order(rows: int, world_size: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(world_size)] if rows else []
    chunks += [[]] * (world_size - len(chunks))
    assert [list(owned_rows(rows, world_size, rank)) for rank in range(world_size)] == chunks


def test_a_plain_tensor_is_its_own_part_from_row_0() -> None:
    tensor = whole(3)
    local, first = local_rows(tensor)
    assert local is tensor
    assert first == 0


def test_a_plain_tensor_takes_all_values_also_as_a_parameter() -> None:
    for tensor in (torch.zeros(3, 2), torch.nn.Parameter(torch.zeros(3, 2))):
        copy_rows_(tensor, whole(3))
        assert torch.equal(tensor, whole(3))


def test_a_plain_tensor_of_another_shape_or_without_dimensions() -> None:
    """A scalar has no rows; a tensor that is held whole takes nothing but all of the values."""
    scalar = torch.zeros(())
    copy_rows_(scalar, torch.tensor(3.0))
    assert scalar == 3
    with pytest.raises(RuntimeError, match="size"):
        copy_rows_(torch.zeros(2, 2), whole(3))


@pytest.mark.parametrize(("rows", "world_size"), LAYOUTS)
def test_every_rank_finds_its_rows_of_a_sharded_tensor(
    be_rank: Callable[..., DeviceMesh], rows: int, world_size: int
) -> None:
    """torch decides how many rows the tensor has on a rank, and the rank's part of the values has to fit in."""
    parts = []
    for rank in range(world_size):
        tensor = zeros(rows, 2, device_mesh=be_rank(rank, world_size), placements=[Shard(0)])
        local, first = local_rows(tensor)
        assert not isinstance(local, DTensor)
        assert first == sum(len(part) for part in parts)
        copy_rows_(tensor, whole(rows))
        assert torch.equal(local, tensor.to_local()), "the part does not share the tensor's memory"
        parts.append(local)
    assert torch.equal(torch.cat(parts), whole(rows))


def test_a_sharded_parameter_takes_its_rows_in_its_own_type(be_rank: Callable[..., DeviceMesh]) -> None:
    """As initial values are drawn: fp32 on the host, into a parameter that needs gradients."""
    tensor = zeros(5, 2, device_mesh=be_rank(1, 2), placements=[Shard(0)], dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(tensor)
    copy_rows_(parameter, whole(5))
    assert torch.equal(parameter.to_local(), whole(5)[3:].bfloat16())
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_a_written_row_is_seen_in_the_sharded_tensor(be_rank: Callable[..., DeviceMesh]) -> None:
    tensor = zeros(5, 2, device_mesh=be_rank(0, 2), placements=[Shard(0)])
    local, _ = local_rows(tensor)
    local[2] = 7.0
    assert tensor.to_local()[2].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()], ids=str)
def test_other_placements_are_refused_and_nothing_is_written(
    be_rank: Callable[..., DeviceMesh], placement: Shard | Replicate | Partial
) -> None:
    tensor = DTensor.from_local(torch.zeros(4, 2), be_rank(1, 2), [placement], run_check=False)
    with pytest.raises(NotImplementedError, match=r"only Shard\(0\) over one mesh dimension is supported, got"):
        local_rows(tensor)
    with pytest.raises(NotImplementedError, match=r"only Shard\(0\)"):
        copy_rows_(tensor, torch.ones(4, 2))
    assert not tensor.to_local().any()


def test_two_mesh_dimensions_are_refused(be_rank: Callable[..., DeviceMesh]) -> None:
    """Rows that are cut twice, or copied along one dimension, are not those of `owned_rows`."""
    mesh = be_rank(1, 4, (2, 2))
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(0)]):
        with pytest.raises(NotImplementedError, match="one mesh dimension"):
            local_rows(zeros(8, 2, device_mesh=mesh, placements=placements))
