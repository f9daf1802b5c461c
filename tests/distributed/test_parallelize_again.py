"""Sharding that is refused, that meets other children beside the model, and that is asked for a second time."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from golden_tiny import CPU, DEFAULT, RECOMPUTING, Parent, build, differing, own_batch
from ranks import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_modules.parallel.fsdp import ParallelOptions, parallelize


def refused(pattern: str, action: Callable[[], object]) -> None:
    """`action` raises ValueError on this rank, with the same words on all (numbers of ranks may differ)."""
    with pytest.raises(ValueError, match=pattern) as caught:
        action()
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, re.sub(r"\d+", "N", str(caught.value)))
    assert len(set(told)) == 1, told


@ranks(2)
def test_refusals(mesh: DeviceMesh, rank: int, world_size: int) -> None:
    """Parameters that no unit holds or that cannot be drawn, tables of other owners, other options the second time."""
    parent = Parent(model=build(device="meta"))
    parent.temperature = nn.Parameter(torch.ones(()))
    refused(
        r"^trainable parameters that are sharded by nobody.*: temperature; put them into a child",
        lambda: parallelize(parent, mesh, DEFAULT, CPU),
    )

    with torch.device("meta"):
        probe = nn.Linear(5, 7)
    undrawn = Parent(model=build(device="meta"), probe=probe)
    refused(r"^probe: is on the meta device", lambda: parallelize(undrawn, mesh, DEFAULT, CPU))

    groups = [dist.new_group([rank]) for rank in range(world_size)]  # every rank owns a table of its own
    fewer = Parent(model=build(device="meta", group=groups[rank]))
    refused(r"^mesh: must be one-dimensional over the owners", lambda: parallelize(fewer, mesh, DEFAULT, CPU))

    # Process groups sort their ranks, so another order can only be the mesh's.
    reverse = DeviceMesh("cpu", list(range(world_size))[::-1], mesh_dim_names=("data_parallel",))
    other = Parent(model=build(device="meta", group=dist.group.WORLD))
    refused(r"^mesh: must be one-dimensional over the owners", lambda: parallelize(other, reverse, DEFAULT, CPU))

    done = Parent(model=build(device="meta"))
    parallelize(done, mesh, DEFAULT, CPU)
    refused(
        r"^model: has been sharded with .*, which cannot be changed to .*activation_checkpointing=True",
        lambda: parallelize(done, mesh, RECOMPUTING, CPU),
    )


@ranks(2)
def test_frozen_parameter_of_the_parent(mesh: DeviceMesh) -> None:
    """A frozen parameter directly on the parent stays as it is."""
    parent = Parent(model=build(device="meta"))
    parent.temperature = nn.Parameter(torch.full((3,), 2.5), requires_grad=False)
    before = parent.temperature
    parallelize(parent, mesh, DEFAULT, CPU)
    assert parent.temperature is before
    assert not isinstance(before, DTensor)
    assert torch.equal(before, torch.full((3,), 2.5))


def probe() -> nn.Linear:
    torch.manual_seed(11)
    return nn.Linear(5, 7, dtype=torch.float64)


def probe_input(rank: int) -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


@ranks(2, 3)
@pytest.mark.parametrize("options", [DEFAULT, ParallelOptions(cpu_offload=True)], ids=["default", "offload"])
def test_second_child(mesh: DeviceMesh, rank: int, world_size: int, options: ParallelOptions) -> None:
    """Another child is sharded like the model, and its gradient is averaged; one without parameters does not matter."""
    plain, ours = probe(), probe()
    for each in range(world_size):
        (plain(probe_input(each)).square().mean() / world_size).backward()
    parallelize(Parent(dropout=nn.Dropout(), probe=ours), mesh, options, CPU)
    assert isinstance(ours, FSDPModule)
    ours(probe_input(rank)).square().mean().backward()
    for parameter, expected in ((ours.weight, plain.weight), (ours.bias, plain.bias)):
        value, gradient = parameter.detach(), parameter.grad
        assert isinstance(value, DTensor)
        assert isinstance(gradient, DTensor)
        assert expected.grad is not None
        assert torch.equal(value.full_tensor(), expected.detach())
        assert (gradient.full_tensor() - expected.grad).norm() / expected.grad.norm() <= 1e-12


def numbers(parent: nn.Module, prefix: str = "") -> dict[str, int]:
    """Which object each parameter is."""
    return {name: id(parameter) for name, parameter in parent.named_parameters(prefix=prefix)}


@ranks(2)
def test_again(mesh: DeviceMesh) -> None:
    """A second call, as for a second ``fit``, changes no parameter and no hook; only a new child is sharded."""
    child, model = probe(), build(device="meta")
    parent = Parent(model=model)
    parallelize(parent, mesh, DEFAULT, CPU)
    before = numbers(parent)
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in parent.modules()]
    torch.manual_seed(17)  # another seed: drawing again would show
    parallelize(parent, mesh, DEFAULT, CPU)
    assert numbers(parent) == before
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in parent.modules()] == hooks
    parent.add_module("probe", child)
    parallelize(parent, mesh, DEFAULT, CPU)
    assert all(isinstance(parameter, DTensor) for parameter in child.parameters())
    assert numbers(model, "model") == before
    assert differing(model, build()) == 0


@ranks(2)
def test_again_after_evaluation(mesh: DeviceMesh) -> None:
    """The same after a forward without gradients, as for ``fit`` after ``validate``: parameters that are left."""
    parent = Parent(model=build(device="meta"))
    parallelize(parent, mesh, DEFAULT, CPU)
    before = numbers(parent)
    own = own_batch("unequal")
    with torch.no_grad():
        parent.get_submodule("model")(own.ids, attention_mask=own.mask)
    parallelize(parent, mesh, DEFAULT, CPU)
    assert numbers(parent) == before


@ranks(2)
def test_again_after_refusal(mesh: DeviceMesh) -> None:
    """Once the reason of a refusal is gone, a second call does what the first did not: values left undrawn."""
    model = build(device="meta")
    parent = Parent(model=model)
    parent.temperature = nn.Parameter(torch.ones(()))
    refused(r"temperature", lambda: parallelize(parent, mesh, DEFAULT, CPU))
    parent.temperature.requires_grad_(False)
    parallelize(parent, mesh, DEFAULT, CPU)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
