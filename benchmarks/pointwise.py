"""Time and memory of RMSNorm, rotation and fake quantisation against the formulas they stand for.

    python benchmarks/pointwise.py [--only norm rotation fp8 mxfp4 nvfp4] [--dtypes float32 bfloat16] [--rounds 9]
        [--json FILE]

"formula" writes each of them out in operations that autograd knows. Norm and rotation run forward and backward, the
quantisers forward: their backward does nothing. Values must be equal in every bit, gradients nearly. Shown are medians
of the process's CPU time of both in turn, one thread; the largest amount of memory that torch's allocator held beyond
the inputs (see `measure.py`); and how much stays for backward, beyond the input and the parameters.

For numbers that do not depend on how large tensors are mapped, set MALLOC_MMAP_THRESHOLD_=4294967296
MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=67108864.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import median_seconds, peak_bytes, write_json
from torch import Tensor

from dsv41.ops.norm import RMSNorm
from dsv41.ops.precision import widen
from dsv41.ops.quantization import fake_quantize
from dsv41.ops.rope import rotate, rotation_table, yarn_frequencies

SIZES = {
    "norm": [(1, 1024, 64), (1, 1024, 256), (1, 4096, 256), (1, 1024, 1280)],
    "rotation": [(1, 1024, 64), (1, 1024, 8, 64), (1, 4096, 8, 64), (1, 1024, 8, 512)],
    "fp8": [(1, 1024, 64), (1, 4096, 64), (1, 1024, 512)],
    "mxfp4": [(1, 1024, 32), (1, 1024, 8, 32), (1, 4096, 8, 32)],
    "nvfp4": [(1, 512, 64), (1, 1024, 512), (1, 4096, 512)],
}
EPS = 1e-20
# Of a tensor that fits into a cache, one run takes less than the clock can tell.
ELEMENTS_PER_ROUND = 1 << 22
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Function = Callable[[Tensor], Tensor]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as it is written."""
    wide = widen(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def plain_rotation(x: Tensor, table: Tensor) -> Tensor:
    """Channels that stay beside the product of those that turn."""
    still = x.shape[-1] - 2 * table.shape[-1]
    pairs = torch.view_as_complex(widen(x[..., still:]).unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * (table.unsqueeze(-2) if x.dim() == 4 else table)).flatten(-2)
    return torch.cat((x[..., :still], turned.to(x.dtype)), dim=-1)


def plain_quantization(x: Tensor, name: str) -> Tensor:
    """Scale, round and scale back, a new tensor every time."""
    size = 16 if name == "nvfp4" else 32
    channels = x.shape[-1]
    groups = F.pad(x.float(), (0, -channels % size)).unflatten(-1, (-1, size))
    most, least = (448.0, 1e-4) if name == "fp8" else (6.0, 6 * 2.0 ** (-9 if name == "nvfp4" else -126))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(least) / most
    if name == "nvfp4":
        scale = scale.clamp_max(448.0).to(torch.float8_e4m3fn).float()
    else:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scaled = (groups / scale).clamp(-most, most)
    if name == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).float()
    else:
        exponent = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)
        shift = exponent.clamp_min(1.0) * (1.5 * 2.0**22)
        codes = (scaled + shift) - shift
    return (codes * scale).flatten(-2)[..., :channels].to(x.dtype)


@dataclass
class Comparison:
    """Both ways to compute one of them, what is differentiated beside the input, and whether anything is."""

    plain: Function
    ours: Function
    parameters: list[Tensor]
    backward: bool = True


def comparison(part: str, shape: tuple[int, ...], dtype: torch.dtype) -> Comparison:
    """What a name in SIZES stands for."""
    if part == "norm":
        norm = RMSNorm(shape[-1], EPS).to(dtype)
        torch.nn.init.normal_(norm.weight, 1.0)
        return Comparison(lambda x: plain_norm(x, norm.weight), norm, [norm.weight])
    if part == "rotation":
        width = 32 if shape[-1] == 64 else 64
        table = rotation_table(yarn_frequencies(width, 10000.0, None), torch.arange(shape[1]).unsqueeze(0))
        return Comparison(lambda x: plain_rotation(x, table), lambda x: rotate(x, table), [])
    return Comparison(lambda x: plain_quantization(x, part), lambda x: fake_quantize(x, part), [], backward=False)


def kept_bytes(function: Function, x: Tensor, parameters: list[Tensor]) -> int:
    """What autograd keeps of one forward, storages counted once, those of the inputs left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *parameters)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(x)
    del out  # only now: its graph holds the storages, whose addresses would be used again
    return sum(kept.values())


def step(function: Function, x: Tensor, incoming: Tensor, parameters: list[Tensor], backward: bool) -> list[Tensor]:
    """One forward, and one backward if there is any: the output and the gradients."""
    if not backward:
        with torch.no_grad():
            return [function(x)]
    out = function(x)
    return [out, *torch.autograd.grad(out, [x, *parameters], incoming)]


def measure(part: str, shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    generator = torch.Generator().manual_seed(0)
    x, incoming = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    case = comparison(part, shape, dtype)
    functions = {"formula": case.plain, "ours": case.ours}
    steps = {
        name: lambda function=function: step(function, x, incoming, case.parameters, case.backward)
        for name, function in functions.items()
    }
    (plain, *exact), (ours, *gradients) = (run() for run in steps.values())
    if not torch.equal(plain, ours):
        raise SystemExit(f"{part} {list(shape)} {dtype}: values differ")
    for one, other in zip(exact, gradients, strict=True):
        error = float((one.float() - other.float()).norm() / one.float().norm())
        if error > LARGEST_ERROR[dtype]:
            raise SystemExit(f"{part} {list(shape)} {dtype}: gradients differ by {error:.1e}")
    repeats = max(1, ELEMENTS_PER_ROUND // x.numel())

    def repeatedly(run: Callable[[], object]) -> Callable[[], None]:
        def all_of_them() -> None:
            for _ in range(repeats):
                run()

        return all_of_them

    taken = median_seconds({name: repeatedly(run) for name, run in steps.items()}, rounds)
    row: dict[str, Any] = {"part": part, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    for name, run in steps.items():
        row[f"{name}_ms"] = taken[name] / repeats * 1e3
        row[f"{name}_peak_mb"] = peak_bytes(run) / 1e6
        row[f"{name}_kept_mb"] = kept_bytes(functions[name], x, case.parameters) / 1e6 if case.backward else 0.0
    return row


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':<36}{'ms':>17}{'':>9}{'peak MB':>17}{'':>9}{'kept MB':>17}")
    rows = []
    for part in options.only:
        for shape in SIZES[part]:
            for dtype in options.dtypes:
                row = measure(part, shape, getattr(torch, dtype), options.rounds)
                rows.append(row)
                columns = ""
                for unit in ("ms", "peak_mb", "kept_mb"):
                    before, after = row[f"formula_{unit}"], row[f"ours_{unit}"]
                    columns += f"{before:>8.2f} {after:>8.2f}"
                    columns += "" if unit == "kept_mb" else f"{before / after:>8.2f}x"
                print(f"{part:<9}{'x'.join(map(str, shape)):<16}{dtype:<11}{columns}", flush=True)
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
