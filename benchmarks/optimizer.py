"""Time and memory of an optimizer step: Engram tables by rows or whole, matrices by AdamW or Muon.

    python benchmarks/optimizer.py [--parts tables matrices] [--rows 100000 1000000] [--ids 8192] [--json FILE]

    tables    a training step's work on one table: lookup of `--ids` ids (power law, spread over the table), backward,
              norm, clipping, optimizer, for tables of growing size. "rows" is row-sparse from end to end; "dense" is
              AdamW over the whole table
    matrices  the optimizer alone over `--layers` pairs of matrices [h, h] and [4 h, h], fp32, for each of `--hidden`

Cases run in turn, several rounds, one thread; shown are medians of the process's CPU time, the largest amount of memory
that a step holds beyond parameters and state, and the state (see `measure.py`). As in `engram.py`, large gradients are
mapped anew in every step unless the allocator is told otherwise. torch's Muon iterates in bf16: on a CPU without bf16
instructions a step may take seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import median_seconds, peak_bytes, write_json
from owner_lookup import draw_ids
from torch import nn
from torch.optim import Optimizer

from dsv41.engram.table import EngramTable
from lightning_modules.optim.groups import OptimizerConfig, build_optimizer
from lightning_modules.training.gradients import clip_by_norm_, gradient_norms, local_gradients

# What is measured, and for each case its step and its optimizer.
Setting = tuple[str, dict[str, tuple[Callable[[], None], Optimizer]]]


class Part(nn.Module):
    """A module under the name that the optimizer knows its kind by."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        name, _, rest = path.partition(".")
        self.add_module(name, Part(rest, module) if rest else module)


def table_step(rows: int, width: int, count: int, rule: Any) -> tuple[Callable[[], None], Optimizer]:
    """A step of one table."""
    table = EngramTable(rows, width, std=1.0)
    optimizer = build_optimizer(Part("layer.engram.embed", table), OptimizerConfig(tables=rule))
    ids = draw_ids("zipf, spread", count, rows, 0)
    upstream = torch.randn(count, width, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        table(ids).backward(upstream)
        gradients = local_gradients({"layer.engram.embed.weight": table.weight})
        clip_by_norm_(gradients, gradient_norms(gradients, torch.device("cpu"), lambda total: total), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def tables_part(options: argparse.Namespace) -> Iterator[Setting]:
    """Tables of growing size."""
    for rows in options.rows:
        hit = len(draw_ids("zipf, spread", options.ids, rows, 0).unique())
        cases = {rule: table_step(rows, options.width, options.ids, rule) for rule in ("dense", "rows")}
        yield f"{rows} x {options.width}, {options.ids} ids, {hit} rows hit", cases


def matrices_part(options: argparse.Namespace) -> Iterator[Setting]:
    """Matrices of growing size."""
    for hidden in options.hidden:
        shapes = [(hidden, hidden), (4 * hidden, hidden)] * options.layers
        cases = {}
        for rule in ("adamw", "muon"):
            linears = [nn.Linear(columns, rows, bias=False) for rows, columns in shapes]
            for linear in linears:
                linear.weight.grad = torch.randn_like(linear.weight)
            module = Part("layer.attn.all", nn.ModuleList(linears))
            optimizer = build_optimizer(module, OptimizerConfig(matrices=rule))
            cases[rule] = optimizer.step, optimizer
        yield f"{len(shapes)} matrices, hidden size {hidden}", cases


PARTS = {"tables": tables_part, "matrices": matrices_part}


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 512])
    for name, default in (("width", 32), ("ids", 8192), ("layers", 4), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for setting, cases in PARTS[part](options):
            # The first step makes the state, which the following ones hold.
            taken = median_seconds({case: step for case, (step, _) in cases.items()}, options.rounds)
            print(f"{part}: {setting}")
            for case, (step, optimizer) in cases.items():
                state = sum(value.nbytes for entries in optimizer.state.values() for value in entries.values())
                row = {"part": part, "setting": setting, "case": case, "ms": taken[case] * 1e3}
                row |= {"peak_mb": peak_bytes(step) / 1e6, "state_mb": state / 1e6}
                print(
                    f"  {case:<8}{row['ms']:>10.2f} ms{row['peak_mb']:>10.2f} MB{row['state_mb']:>10.2f} MB state"
                    f"{next(iter(taken.values())) / taken[case]:>8.1f}x",
                    flush=True,
                )
                rows.append(row)
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
