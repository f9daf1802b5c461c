"""Cost of looking up Engram rows that other ranks own.

    torchrun --standalone --nproc-per-node 2 benchmarks/owner_lookup.py --json lookup.json

Compares, forward only and on the same ids, in one interleaved run:

    distinct    the lookup of `EngramTable`: each distinct id is asked for once
    repeated    the same exchange without removing repetitions (ids sorted by owner)
    all-gather  every rank collects the whole table, then indexes it: what row ownership avoids

Ids are uniform, or follow a power law (exponent 1.1) whose frequent rows are spread over the owners or lie on the first
one. Times are medians over `--repeats` of the slowest rank; bytes are what one rank sends to others, the mean over
ranks. The exchange grows with the ids asked for, the all-gather with the rows of the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measure import write_json
from torch import Tensor

from dsv41.engram.table import EngramTable
from dsv41.ranks import owned_rows


def draw_ids(kind: str, count: int, rows: int, rank: int) -> Tensor:
    """int64 ids [count] of one rank."""
    generator = torch.Generator().manual_seed(rank)
    if kind == "uniform":
        return torch.randint(0, rows, (count,), generator=generator)
    weights = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.1
    ids = torch.searchsorted(weights.cumsum(0) / weights.sum(), torch.rand(count, generator=generator).double())
    ids = ids.clamp_max(rows - 1)
    if kind == "zipf, spread":
        return torch.randperm(rows, generator=torch.Generator().manual_seed(99))[ids]
    return ids


def off_rank_bytes(asked: list[int], width: int, itemsize: int, rank: int) -> int:
    """Ids that leave a rank and, as many from the others' view, rows that come to it."""
    foreign = sum(asked) - asked[rank]
    return foreign * (8 + width * itemsize)


def counts_per_owner(ids: Tensor, table: EngramTable) -> list[int]:
    """How many of the ids each rank owns."""
    share = len(owned_rows(table.rows, table.world_size, 0))
    return torch.bincount(ids // share, minlength=table.world_size).tolist()


def lookup_repeated(table: EngramTable, ids: Tensor) -> Tensor:
    """`EngramTable`'s exchange with every repetition sent."""
    group = table.process_group
    ordered, order = ids.sort(stable=True)
    ask = torch.tensor(counts_per_owner(ids, table))
    serve = torch.empty_like(ask)
    dist.all_to_all_single(serve, ask, group=group)
    requests = ordered.new_empty(int(serve.sum()))
    dist.all_to_all_single(requests, ordered, serve.tolist(), ask.tolist(), group=group)
    rows = table.weight.detach()[requests - table.owned.start]
    answers = rows.new_empty(len(ids), rows.shape[1])
    dist.all_to_all_single(answers, rows, ask.tolist(), serve.tolist(), group=group)
    out = torch.empty_like(answers)
    out[order] = answers
    return out


def lookup_all_gather(table: EngramTable, ids: Tensor) -> Tensor:
    """Index a table collected from all ranks."""
    share = len(owned_rows(table.rows, table.world_size, 0))
    padded = torch.zeros(share, table.weight.shape[1])
    padded[: len(table.owned)] = table.weight.detach()
    whole = torch.empty(share * table.world_size, padded.shape[1])
    dist.all_gather_into_tensor(whole, padded, group=table.process_group)
    return whole[ids]


def main() -> None:
    """Parse the command line, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--width", type=int, default=64, help="channels of a row (fp32)")
    parser.add_argument("--ids", type=int, default=32768, help="ids per rank and lookup")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each variant")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = EngramTable(arguments.rows, arguments.width, std=1.0, process_group=dist.group.WORLD)
    results = []
    for kind in ("uniform", "zipf, spread", "zipf, one owner"):
        ids = draw_ids(kind, arguments.ids, arguments.rows, rank)
        distinct = ids.unique()
        share = len(owned_rows(table.rows, world_size, 0)) * arguments.width * 4
        sent = {
            "distinct": off_rank_bytes(counts_per_owner(distinct, table), arguments.width, 4, rank),
            "repeated": off_rank_bytes(counts_per_owner(ids, table), arguments.width, 4, rank),
            "all-gather": share * (world_size - 1),
        }
        variants: dict[str, Callable[[], Tensor]] = {
            "distinct": lambda ids=ids: table(ids).detach(),
            "repeated": lambda ids=ids: lookup_repeated(table, ids),
            "all-gather": lambda ids=ids: lookup_all_gather(table, ids),
        }
        outputs = [variant() for variant in variants.values()]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(arguments.repeats):
            for name, variant in variants.items():
                dist.barrier()
                start = time.perf_counter()
                variant()
                slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                seconds[name].append(float(slowest))
        totals = torch.tensor([*sent.values(), len(distinct) / len(ids)], dtype=torch.float64)
        dist.all_reduce(totals)
        *megabytes, unique_share = (totals / world_size).tolist()
        for name, size in zip(variants, megabytes, strict=True):
            results.append(
                {
                    "ids": kind,
                    "distinct share": unique_share,
                    "variant": name,
                    "milliseconds": 1e3 * statistics.median(seconds[name]),
                    "megabytes sent": size / 1e6,
                }
            )
    if rank == 0:
        print(f"{world_size} ranks, {arguments.rows} x {arguments.width} fp32 rows, {arguments.ids} ids per rank")
        print(f"{'ids':<18}{'distinct':>9}  {'variant':<12}{'ms':>9}{'MB sent':>10}")
        for line in results:
            print(
                f"{line['ids']:<18}{line['distinct share']:>9.1%}  {line['variant']:<12}"
                f"{line['milliseconds']:>9.1f}{line['megabytes sent']:>10.2f}"
            )
        write_json(arguments.json, vars(arguments) | {"ranks": world_size}, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
