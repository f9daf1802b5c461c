"""Time and memory of the routed experts, forward and backward of one layer.

    python benchmarks/experts.py [--tokens 1024 4096] [--experts 16 64 384] [--hidden 256 --width 128] [--json FILE]

Compares, on the same tokens, matrices and random routing (one expert in eight stays empty):

    plain    autograd through a loop over experts that indexes the stacked matrices: what one writes first (left out
             above 64 experts, where it takes minutes)
    loop     `BackendConfig(experts="loop")`
    grouped  `BackendConfig(experts="grouped")`

One thread, the process's CPU time, medians of interleaved rounds; memory beyond the inputs (see `measure.py`).

What grows with what: "plain" with the square of the number of experts, since the backward of each index makes a
gradient of the whole stack; the others with tokens and with the matrices, whose gradients are written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import median_seconds, peak_bytes, write_json
from torch import Tensor

from dsv41.ops.experts import IMPLEMENTATIONS, ExpertProducts, swiglu

LIMIT = 10.0


def plain_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """The first formulation that comes to mind."""
    out = torch.zeros_like(x, dtype=weights.dtype)
    for index in range(len(w1)):
        tokens, slots = torch.where(experts == index)
        rows = x[tokens]
        inner = swiglu(rows @ w1[index].t(), rows @ w3[index].t(), limit) * weights[tokens, slots].unsqueeze(-1)
        out = out.index_add(0, tokens, (inner.to(x.dtype) @ w2[index].t()).to(out.dtype))
    return out


def step(
    products: ExpertProducts, tokens: int, count: int, dtype: torch.dtype, options: argparse.Namespace
) -> Callable:
    """One forward and backward."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(tokens, count, generator=generator)
    draw[:, ::8] = -1.0  # nobody goes there
    experts = draw.topk(options.topk, dim=-1).indices
    weights = torch.rand(tokens, options.topk, generator=generator)
    hidden, width = options.hidden, options.width
    shapes = ((tokens, hidden), (count, width, hidden), (count, hidden, width), (count, width, hidden))
    x, w1, w2, w3 = (torch.randn(*shape, generator=generator).mul_(0.05).to(dtype) for shape in shapes)
    leaves = [tensor.requires_grad_() for tensor in (x, weights, w1, w2, w3)]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        products(x, experts, weights, w1, w2, w3, LIMIT).sum().backward()

    return run


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 64, 384])
    for name, default in (("hidden", 256), ("width", 128), ("topk", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"plain": plain_experts, "loop": IMPLEMENTATIONS["loop"], "grouped": IMPLEMENTATIONS["grouped"]}
    rows = []
    for tokens in options.tokens:
        for count in options.experts:
            dtype = getattr(torch, options.dtype)
            shown = {name: products for name, products in kinds.items() if name != "plain" or count <= 64}
            steps = {name: step(products, tokens, count, dtype, options) for name, products in shown.items()}
            taken = median_seconds(steps, options.rounds)
            peaks = {name: peak_bytes(run) for name, run in steps.items()}
            first = next(iter(steps))
            for name in steps:
                row = {"tokens": tokens, "experts": count, "kind": name, "ms": taken[name] * 1e3, "bytes": peaks[name]}
                rows.append(row)
                print(
                    f"{tokens:>6} tokens {count:>4} experts  {name:<8}{taken[name] * 1e3:>9.1f} ms "
                    f"{peaks[name] / 1e6:>8.1f} MB {taken[first] / taken[name]:>7.1f}x time "
                    f"{peaks[first] / peaks[name]:>7.1f}x memory",
                    flush=True,
                )
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
