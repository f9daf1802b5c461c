"""Time and memory of the attention cores, forward and backward of one layer.

    python benchmarks/attention.py [--lengths 512 1024 2048] [--width 64 --topk 64 --window 64 --heads 8] [--json FILE]

Every implementation gets the same queries, keys and selections (random positions, as scattered as they come). They run
in turn, several rounds, one thread; shown are medians of the process's CPU time, so that other work on the machine
matters little, and the largest amount of memory that torch's allocator held beyond the inputs (see `measure.py`).
`--alpha` compares thresholds below which the sparse core scores all visible positions instead of gathering the
selected ones.

What grows with what: "eager" and "sdpa" with the square of the length, in time and memory; "sparse" with the length.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import median_seconds, peak_bytes, write_json
from torch import Tensor

from dsv41.attention import AttentionCore
from dsv41.ops import sparse_attention
from dsv41.ops.selection import stable_topk


def inputs(length: int, options: argparse.Namespace) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, raw and compressed keys; a random causal selection; live tokens."""
    generator = torch.Generator().manual_seed(0)
    positions = length // options.ratio
    tensors = [
        torch.randn(1, length, options.heads, options.width, generator=generator),
        torch.randn(1, length, options.width, generator=generator),
        torch.randn(1, positions, options.width, generator=generator),
    ]
    scores = torch.rand(1, length, positions, generator=generator)
    ended = (torch.arange(length) + 1) // options.ratio
    scores = scores.masked_fill(torch.arange(positions) >= ended.unsqueeze(-1), float("-inf"))
    return tensors, stable_topk(scores, options.topk), torch.ones(1, length, dtype=torch.bool)


def step(implementation: str, alpha: int, length: int, options: argparse.Namespace) -> Callable[[], None]:
    """One forward and backward."""
    tensors, selection, live = inputs(length, options)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    core = AttentionCore(options.heads, options.window, options.ratio, implementation)

    def run() -> None:
        sparse_attention.ALPHA = alpha
        for leaf in leaves:
            leaf.grad = None
        core(*leaves, selection, live)[0].sum().backward()

    return run


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    for name, default in (("heads", 8), ("width", 64), ("topk", 64), ("window", 64), ("ratio", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--alpha", type=int, nargs="+", default=[sparse_attention.ALPHA])
    parser.add_argument("--only-sparse", action="store_true", help="leave the dense cores out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [("sparse", alpha) for alpha in options.alpha]
    if not options.only_sparse:
        kinds = [("eager", 0), ("sdpa", 0), *kinds]
    rows = []
    for length in options.lengths:
        steps = {kind: step(*kind, length, options) for kind in kinds}
        taken = median_seconds(steps, options.rounds)
        for kind, run in steps.items():
            seconds = taken[kind]
            name = kind[0] if kind[0] != "sparse" else f"sparse, alpha {kind[1]}"
            rows.append({"length": length, "core": name, "ms": seconds * 1e3, "peak_mb": peak_bytes(run) / 1e6})
            first = next(row for row in rows if row["length"] == length)
            faster, smaller = first["ms"] / rows[-1]["ms"], first["peak_mb"] / rows[-1]["peak_mb"]
            print(
                f"{length:>6} {name:<18}{seconds * 1e3:>10.1f} ms {rows[-1]['peak_mb']:>9.1f} MB"
                f"{faster:>8.1f}x time {smaller:>8.1f}x memory",
                flush=True,
            )
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
