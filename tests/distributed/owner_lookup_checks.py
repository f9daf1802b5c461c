"""Run by `test_owner_lookup.py` on several ranks: compares owner-sharded tables with a dense one.

    torchrun --nproc-per-node W owner_lookup_checks.py RESULT.json

Each check returns the worst deviation over its cases on this rank; rank 0 writes, for every check, the list over ranks.
A check that raises ends the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import run
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.engram.table import EngramTable

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
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


def check_initial_rows() -> float:
    """Whoever owns a row, it starts with the same value."""
    worst = 0.0
    for rows in (ROWS, 2, 5000):
        table, dense = make(rows), make(rows, sharded=False)
        assert len(table.weight) == len(table.owned)
        worst = max(worst, float((table.weight - own_rows(dense.weight, table)).detach().abs().sum()))
    return worst


def check_forward() -> float:
    """Bit-equal to indexing, for every kind of request, table size and dtype."""
    differing = 0
    for rows in (ROWS, 2):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            table, dense = make(rows, dtype), make(rows, dtype, sharded=False)
            for case in CASES:
                for id_type in (torch.int64, torch.int32):
                    ids = request(case, dist.get_rank(), rows).to(id_type)
                    out = table(ids)
                    assert out.shape == (*ids.shape, WIDTH)
                    assert out.dtype == dtype
                    differing += int((out != dense.weight[ids.long()]).sum())
    return float(differing)


def _gradient_error(recompute: bool) -> float:
    worst = 0.0
    for rows in (ROWS, 2):
        for case in CASES:
            table, rank = make(rows), dist.get_rank()
            ids = request(case, rank, rows)
            out = checkpoint(table, ids, use_reentrant=False) if recompute else table(ids)
            loss_of(out, ids, rank).backward()
            expected = own_rows(dense_gradient(case, rows), table)
            assert table.weight.grad is not None
            worst = max(worst, float((table.weight.grad - expected).abs().max()) if len(expected) else 0.0)
    return worst


def check_gradient() -> float:
    """Owners get the gradient of the mean loss: divided by the number of ranks exactly once."""
    return _gradient_error(recompute=False)


def check_gradient_with_recomputation() -> float:
    """The same when the lookup runs again in the backward pass."""
    return _gradient_error(recompute=True)


def check_accumulated_gradient() -> float:
    """Two backward passes add up; an earlier one is not divided again."""
    table, rank = make(), dist.get_rank()
    for case in ("random", "repeated"):
        ids = request(case, rank, ROWS)
        loss_of(table(ids), ids, rank).backward()
    expected = own_rows(dense_gradient("random", ROWS) + dense_gradient("repeated", ROWS), table)
    assert table.weight.grad is not None
    return float((table.weight.grad - expected).abs().max())


def check_sparse_gradient() -> float:
    """A row-sparse gradient, of a plain weight and of a DTensor, after one pass, after two and with recomputation.

    Of a DTensor, every rank's gradient has the global shape and this rank's rows alone.
    """
    worst, rank = 0.0, dist.get_rank()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
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
                    error = (ours - passes * own_rows(expected, table)).abs()
                    worst = max(worst, float(error.max()) if len(error) else 0.0)
    return worst


def check_sparse_gradient_under_fsdp() -> float:
    """The table as a parameter that FSDP2 ignores, in a unit whose other parameters it shards."""
    table, projection, rank = make(), torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), dist.get_rank()
    table.sparse_gradient = True
    torch.nn.init.eye_(projection.weight)
    module = torch.nn.Sequential(table, projection)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    fully_shard(module, mesh=mesh, ignored_params={table.shard(mesh)})
    ids = request("random", rank, ROWS)
    for _ in range(2):
        loss_of(module(ids), ids, rank).backward()
    assert isinstance(projection.weight.grad, DTensor)
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.layout == torch.sparse_coo
    return float(own_rows(gradient.to_dense() - 2 * dense_gradient("random", ROWS), table).abs().max())


def check_frozen() -> float:
    """A frozen table answers, and no gradient exchange is started."""
    table = make()
    table.weight.requires_grad_(False)
    ids = request("random", dist.get_rank(), ROWS)
    out = table(ids)
    assert not out.requires_grad
    return float((out != make(sharded=False).weight[ids]).sum())


def check_bad_id() -> float:
    """All ranks raise alike when one asks for a row that does not exist, and the table works afterwards."""
    table, rank = make(), dist.get_rank()
    culprit = dist.get_world_size() - 1
    for bad in (-1, ROWS, 2**40):
        ids = request("random", rank, ROWS)
        if rank == culprit:
            ids = ids.clone()
            ids.view(-1)[2] = bad
        expected = f"hash ids: ids must lie in 0..{ROWS - 1}, got {bad} (asked for by rank {culprit})"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            table(ids)
    return check_frozen()


def check_dtensor() -> float:
    """As a DTensor on the mesh: logical shape, same rows, same gradient; other meshes are refused."""
    world = list(range(dist.get_world_size()))
    mesh = DeviceMesh("cpu", world)
    table, rank = make(), dist.get_rank()
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
    worst = float((parameter.grad.full_tensor() - expected).abs().max())
    torch.optim.SGD([parameter], lr=0.5).step()
    worst = max(worst, float((parameter.full_tensor() - (dense.weight - 0.5 * expected)).detach().abs().max()))
    for other in (DeviceMesh("cpu", world[::-1]), DeviceMesh("cpu", [world])):
        with pytest.raises(ValueError, match=r"^mesh: must be one-dimensional over the owners"):
            make().shard(other)
    return worst


def tiny(sharded: bool) -> DeepseekV41ForCausalLM:
    torch.manual_seed(3)
    raw = json.loads((GOLDEN / "config.json").read_text())
    raw["text_config"].pop("dspark_noise_token_id")
    return DeepseekV41ForCausalLM(
        DeepseekV41Config(**raw),
        tokenizer=Tokenizer.from_file(str(GOLDEN / "tokenizer.json")),
        engram_process_group=dist.group.WORLD if sharded else None,
    )


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of one rank; n-grams repeat within and across ranks, live labels differ in number."""
    generator = torch.Generator().manual_seed(rank // 2)
    ids = torch.randint(3, 60, (2, 10 + rank), generator=generator)
    ids[1, 4:8] = ids[0, 1:5]
    labels = ids.clone()
    labels[0, : 2 + 3 * rank] = -100
    return ids, labels


def check_model() -> float:
    """A whole model in float64: every parameter's gradient against one process, relative to its norm."""
    torch.set_default_dtype(torch.float64)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model, dense = tiny(sharded=True), tiny(sharded=False)
    ids, labels = batch(rank)
    model(ids, labels=labels).loss.backward()
    losses = [dense(*batch(r)[:1], labels=batch(r)[1]).loss for r in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()
    torch.set_default_dtype(torch.float32)
    worst, oracle = 0.0, dict(dense.named_parameters())
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
        worst = max(worst, float((ours - expected_here).norm() / expected.norm()))
    tables = model.prepare_model_owned_dtensors(DeviceMesh("cpu", list(range(world_size))))
    assert {tuple(parameter.shape) for parameter in tables} == {(408, 16), (484, 16)}
    assert tables < set(model.parameters())
    return worst


CHECKS: list[Callable[[], float]] = [
    check_initial_rows,
    check_forward,
    check_gradient,
    check_gradient_with_recomputation,
    check_accumulated_gradient,
    check_sparse_gradient,
    check_sparse_gradient_under_fsdp,
    check_frozen,
    check_bad_id,
    check_dtensor,
    check_model,
]


if __name__ == "__main__":
    run(CHECKS)
