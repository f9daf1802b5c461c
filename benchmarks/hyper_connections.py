"""Time and memory of one mHC site, forward and backward, around a sublayer that does nothing.

    python benchmarks/hyper_connections.py [--tokens 1024 4096] [--hidden 256 1024] [--dtypes float32 bfloat16]
        [--compile] [--rounds 7] [--json FILE]

"plain" writes the formulas of ARCHITECTURE 3 out under autograd; "matmul" does too, but mixes the streams by a matrix
product, which spares the [C, C, H] products of every token. "ours" is `dsv41.ops.mixing`, "compiled" the same
behind `compile_hc`. They run in turn, several rounds, one thread; shown are medians of the process's CPU time, and
the largest amount of memory that torch's allocator held beyond the inputs (see `measure.py`). Values and gradients are
compared with "plain" in float64; "error" is the largest relative norm of a difference.

Large tensors are mapped anew for every operation unless the allocator is told otherwise, which the formulas pay most
for. For numbers that do not depend on that, set MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592
MALLOC_TOP_PAD_=67108864.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import median_seconds, peak_bytes, write_json
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41TextConfig
from dsv41.hyper_connections import HyperConnection
from dsv41.ops.mixing import expand

STREAMS = 4
Site = Callable[[HyperConnection, Tensor, Tensor], tuple[Tensor, Tensor]]


def ours(
    site: HyperConnection, streams: Tensor, carried: Tensor, implementation: str = "eager"
) -> tuple[Tensor, Tensor]:
    """Streams behind the site and the mixture it predicts."""
    y, pre, post, comb = site(streams, carried)
    return expand(y, streams, post, comb, implementation), pre


def formulas(site: HyperConnection, streams: Tensor, carried: Tensor, matmul: bool) -> tuple[Tensor, Tensor]:
    """The same under autograd, term by term."""
    wide = streams if streams.dtype == torch.float64 else streams.float()
    flat = wide.flatten(-2)
    mixes = flat @ site.fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + site.norm_eps)
    parts = (STREAMS, STREAMS, STREAMS * STREAMS)
    scale = torch.cat([one.expand(size) for one, size in zip(site.scale, parts, strict=True)])
    pre, post, logits = torch.addcmul(site.base, mixes, scale).split(parts, dim=-1)
    pre, post = pre.sigmoid() + site.eps, 2 * post.sigmoid()
    comb = logits.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + site.eps
    for step in range(2 * site.iterations - 1):
        comb = comb / (comb.sum(-1 if step % 2 else -2, keepdim=True) + site.eps)
    y = (carried.unsqueeze(-1) * wide).sum(-2).to(streams.dtype)
    mixed = comb.mT @ wide if matmul else (comb.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
    out = post.unsqueeze(-1) * y.to(wide.dtype).unsqueeze(-2) + mixed
    return out.to(streams.dtype), pre


def plain(site: HyperConnection, streams: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas as they are written."""
    return formulas(site, streams, carried, matmul=False)


def matmul(site: HyperConnection, streams: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas with a matrix product per token."""
    return formulas(site, streams, carried, matmul=True)


def compiled(site: HyperConnection, streams: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """`ours` with the compiled core."""
    return ours(site, streams, carried, "compiled")


def step(site: Site, tokens: int, hidden: int, dtype: torch.dtype, exact: bool = False) -> Callable[[], list[Tensor]]:
    """One forward and backward, which gives back values and gradients; `exact` widens the same inputs to float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, to: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(*shape, generator=generator).to(to)
        return drawn.double() if exact else drawn

    module = HyperConnection(DeepseekV41TextConfig(hidden_size=hidden, hc_mult=STREAMS), BackendConfig())
    module.to(torch.float64 if exact else torch.float32)
    with torch.no_grad():
        module.fn.copy_(draw(*module.fn.shape) * 0.02)
        module.base.copy_(draw(*module.base.shape))
        module.scale.copy_(draw(*module.scale.shape))
    streams = draw(1, tokens, STREAMS, hidden, to=dtype).requires_grad_()
    carried = draw(1, tokens, STREAMS).requires_grad_()
    incoming = draw(1, tokens, STREAMS, hidden, to=dtype), draw(1, tokens, STREAMS)
    leaves = [streams, carried, *module.parameters()]

    def run() -> list[Tensor]:
        out = site(module, streams, carried)
        return [*out, *torch.autograd.grad(out, leaves, incoming)]

    return run


def error(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Largest relative norm of a difference."""
    return max(float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in zip(ours, exact, strict=True))


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="the compiled core too: seconds per size and type")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sites: dict[str, Site] = {"plain": plain, "matmul": matmul, "ours": ours}
    if options.compile:
        sites["compiled"] = compiled
    rows = []
    for hidden in options.hidden:
        for tokens in options.tokens:
            for name in options.dtypes:
                dtype = getattr(torch, name)
                runs = {kind: step(site, tokens, hidden, dtype) for kind, site in sites.items()}
                exact = step(plain, tokens, hidden, dtype, exact=True)()
                errors = {kind: error(run(), exact) for kind, run in runs.items()}
                del exact
                taken = median_seconds(runs, options.rounds)
                sizes = {kind: peak_bytes(run) / 1e6 for kind, run in runs.items()}
                for kind in runs:
                    row = {"hidden": hidden, "tokens": tokens, "dtype": name, "site": kind}
                    rows.append(row | {"ms": taken[kind] * 1e3, "peak_mb": sizes[kind], "error": errors[kind]})
                    print(
                        f"{hidden:>5} {tokens:>6} {name:<9}{kind:<9}{taken[kind] * 1e3:>9.1f} ms {sizes[kind]:>8.1f} MB"
                        f"{taken['plain'] / taken[kind]:>7.1f}x time {sizes['plain'] / sizes[kind]:>6.1f}x memory"
                        f"   error {errors[kind]:.0e}",
                        flush=True,
                    )
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
