"""Rules of optimizers on shapes that leave ranks fewer rows or none, against one process with the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from training_runs import collected, whole

from dsv41.engram.table import EngramTable
from dsv41.ranks import owned_rows
from lightning_modules.optim.muon import ShardedMuon
from lightning_modules.optim.row_adam import RowAdam
from lightning_modules.optim.state import sharded_like, sharded_rows, sharded_state


@ranks(2, 3)
@pytest.mark.parametrize("rows", [4, 7])
def test_row_adam(mesh: DeviceMesh, rows: int) -> None:
    """`RowAdam` over a sharded table: two lookups a step, other ids on each rank, and a state that is cut and put
    together again halfway."""
    torch.manual_seed(0)
    whole_table = EngramTable(rows, 3, 1.0, sparse_gradient=True).double()
    table = copy.deepcopy(whole_table)
    table.shard(mesh)
    ours, theirs = (RowAdam(each.parameters(), 0.1, (0.9, 0.95)) for each in (table, whole_table))
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for _ in range(2):
            # Of rank r, the r-th row; the last row of the table is read in one step only.
            ids = torch.randint(rows if step == 2 else rows - 1, (mesh.size(), 4), generator=generator)
            scale = torch.randn(mesh.size(), 4, 3, generator=generator, dtype=torch.float64)
            mine = mesh.get_local_rank()
            (table(ids[mine]) * scale[mine]).sum().backward()
            (whole_table(ids) * scale / mesh.size()).sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        states = [whole(optimizer.state[p]) for optimizer, p in ((ours, table.weight), (theirs, whole_table.weight))]
        states[0]["table"], states[1]["table"] = collected(table.weight.detach()), whole_table.weight.detach()
        for key, value in states[1].items():
            assert float((states[0][key] - value).double().norm()) <= 1e-13 * float(value.double().norm()), key
        assert ours.state[table.weight]["hits"].placements == table.weight.placements
        if step == 2:
            stored = {key: collected(value) for key, value in ours.state[table.weight].items()}
            ours = RowAdam(table.parameters())
            ours.load_state_dict(sharded_state(ours, theirs.state_dict() | {"state": {0: stored}}))


@ranks(2, 3)
@pytest.mark.parametrize("shape", [(1, 4), (2, 9), (9, 2), (7, 5), (5, 7), (16, 16)])
def test_muon(mesh: DeviceMesh, shape: tuple[int, int]) -> None:
    """`ShardedMuon` updates as on one process, whatever the rows of a rank."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    own = owned_rows(shape[0], mesh.size(), mesh.get_local_rank())
    alone = torch.nn.Parameter(start.clone())
    shared = torch.nn.Parameter(sharded_like(distribute_tensor(start, mesh, [Shard(0)]), start))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = ShardedMuon([shared], **options), ShardedMuon([alone], **options)
    for _ in range(3):
        alone.grad = torch.randn(shape, generator=generator)
        shared.grad = sharded_rows(alone.grad[own.start : own.stop].clone(), shared)
        ours.step()
        theirs.step()
    # torch adds step and value in one rounding, here there are two.
    torch.testing.assert_close(collected(shared.detach()), alone.detach(), rtol=1e-6, atol=1e-7, msg=str(shape))
    # Blocks of other sizes end in other places, where a processor may round otherwise.
    average = theirs.state[alone]["momentum_buffer"]
    assert float((collected(ours.state[shared]["momentum_buffer"]) - average).norm()) <= 1e-7 * float(average.norm())
