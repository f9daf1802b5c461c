"""Checkpoints by the strategy without a trainer: from some ranks to as many or others, in a folder or in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from bare_strategy import bare_strategy
from ranks import ranks, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from training_runs import whole

from dsv41.engram.table import EngramTable
from lightning_modules.checkpoint.single_file import AtomicCheckpointIO
from lightning_modules.strategy import EngramFSDPStrategy

OPTIMIZERS: dict[str, Any] = {"AdamW": AdamW, "without state": SGD}
Values = dict[str, Tensor]


class Module(L.LightningModule):
    """A table of 7 rows, which no number of ranks divides, a projection, and a norm with fewer rows than 3 ranks."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = EngramTable(7, 4, 1.0).double()
        self.projection = nn.Linear(4, 5, dtype=torch.float64)
        self.norm = nn.LayerNorm(2, dtype=torch.float64)
        self.idle = nn.Linear(4, 3, dtype=torch.float64)
        self.table.shard(mesh)
        for child in (self.projection, self.norm, self.idle):
            fully_shard(child, mesh=mesh)

    def loss(self, ids: Tensor) -> Tensor:
        out = self.projection(self.table(ids))
        return (self.norm(out[:, :2]) * out[:, 2:4]).square().mean()


def sharded_training(mesh: DeviceMesh, seed: int, kind: str, one_file: bool) -> EngramFSDPStrategy:
    """A strategy with a sharded module and an optimizer."""
    strategy = bare_strategy(sharded=not one_file)
    module = Module(mesh, seed)
    strategy._lightning_module = module
    strategy.optimizers = [OPTIMIZERS[kind](module.parameters(), lr=0.1)]
    return strategy


def step(strategy: EngramFSDPStrategy) -> None:
    assert isinstance(strategy.lightning_module, Module)
    generator = torch.Generator().manual_seed(dist.get_rank())
    strategy.optimizers[0].zero_grad()
    strategy.lightning_module.loss(torch.randint(6, (8,), generator=generator)).backward()
    strategy.optimizers[0].step()


def tensors(module: nn.Module, optimizer: Optimizer) -> Values:
    """Parameters and state of the optimizer by name, whole."""
    named = dict(module.named_parameters())
    states = {
        f"{name}/{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return whole(named | states)


def save(strategy: EngramFSDPStrategy, path: Path) -> None:
    state = strategy.optimizer_state(strategy.optimizers[0])
    model = strategy.lightning_module_state_dict()
    strategy.save_checkpoint(
        {"state_dict": model, "optimizer_states": [state], "global_step": 2, "pytorch-lightning_version": "2.6.6"}, path
    )


def load(strategy: EngramFSDPStrategy, path: Path) -> None:
    checkpoint = strategy.load_checkpoint(path)
    assert checkpoint["global_step"] == 2
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)


def ends(strategy: EngramFSDPStrategy) -> Values:
    assert strategy.lightning_module is not None
    return tensors(strategy.lightning_module, strategy.optimizers[0])


@ranks(2, 3)
@pytest.mark.parametrize("one_file", [False, True], ids=["folder", "one file"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_resumes_bit_for_bit(mesh: DeviceMesh, kind: str, one_file: bool, tmp_path: Path) -> None:
    """Two steps, a checkpoint and a third are three steps, for a model and an optimizer that had other values."""
    unbroken = sharded_training(mesh, 9, kind, one_file)
    for _ in range(2):
        step(unbroken)
    path = tmp_path / "step-00000002.ckpt"
    save(unbroken, path)
    assert path.is_file() == one_file
    resumed = sharded_training(mesh, 5, kind, one_file)
    if kind == "AdamW":
        step(resumed)
    load(resumed, path)
    for each in (unbroken, resumed):
        step(each)
    expected, found = ends(unbroken), ends(resumed)
    # Seven parameters, of which two get no gradient, with three entries each.
    assert len(expected) == 7 + (5 * 3 if kind == "AdamW" else 0)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def saved_by_ranks(mesh: DeviceMesh, one_file: bool, path: Path) -> Values:
    strategy = sharded_training(mesh, 9, "AdamW", one_file)
    for _ in range(2):
        step(strategy)
    save(strategy, path)
    return ends(strategy)


def loaded_by_ranks(mesh: DeviceMesh, one_file: bool, path: Path) -> Values:
    strategy = sharded_training(mesh, 5, "AdamW", one_file)
    load(strategy, path)
    return ends(strategy)


@pytest.mark.parametrize("one_file", [False, True], ids=["folder", "one file"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
def test_another_number_of_ranks_reads_the_same(before: int, after: int, one_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "step-00000002.ckpt"
    expected = run(saved_by_ranks, before, one_file=one_file, path=path)[0]
    found = run(loaded_by_ranks, after, one_file=one_file, path=path)[0]
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    stored = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]
    assert len(stored) == 7
    assert all(torch.equal(expected[name], value) for name, value in stored.items())
