"""Loading and saving the released layout against plain safetensors, in bytes of file per second.

    python benchmarks/checkpoint_io.py [--megabytes 256] [--rounds 5] [--json FILE]

One model, nearly all of it in one Engram table, in projections or in experts, is written in each format, read back and
written again. safetensors maps a file, so its `load_file` alone reads nothing. What others are compared with:

    fresh     `load_file(backend="pread")`: the tensors in memory of their own, in their stored dtype
    copied    `load_file` and a copy of every tensor into memory of its stored dtype that exists already, the least
              that a loader can do; nothing is decoded or widened

Decoding into fp32 writes four (FP8) or eight (FP4) times the bytes that it reads. Everything comes from the page cache
and goes to it; saving includes flushing to the disk and the checksum.

Columns: wall seconds, one thread, medians of interleaved rounds.

    GB/s of file of each; behind the last three as multiples of fresh, then of copied:
    load      `load_released` without looking at checksums
    checked   with them
    save      `save_released`

Time of all grows with the bytes; scratch does not (16 MB slices).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import write_json
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.checkpoint import load_released, save_released

# Name, what the bytes are in, the model's dtype, options of `save_released`.
CASES: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
    ("FP32 into fp32", "table", torch.float32, {}),
    ("BF16 into bf16", "table", torch.bfloat16, {}),
    ("BF16 into fp32", "table", torch.float32, {"dtype": torch.bfloat16}),
    ("FP8 rows into fp32", "table", torch.float32, {"quantized": True}),
    ("FP8 rows into bf16", "table", torch.bfloat16, {"quantized": True}),
    ("FP8 blocks into fp32", "shared", torch.float32, {"quantized": True}),
    ("FP8 blocks into bf16", "shared", torch.bfloat16, {"quantized": True}),
    ("FP4 into fp32", "experts", torch.float32, {"quantized": True}),
    ("FP4 into bf16", "experts", torch.bfloat16, {"quantized": True}),
]


def build(kind: str, parameters: int, dtype: torch.dtype) -> DeepseekV41ForCausalLM:
    """A model of about `parameters`, nearly all of them in one kind of tensor."""
    words = {f"w{index}": index for index in range(64)}
    width = max(64, int(parameters / 3 / 1024) // 32 * 32)
    config = DeepseekV41TextConfig(
        vocab_size=64,
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=1,
        moe_intermediate_size={"table": 32, "shared": width, "experts": max(32, width // 8 // 32 * 32)}[kind],
        n_routed_experts={"table": 1, "shared": 1, "experts": 8}[kind],
        num_experts_per_tok=1,
        compress_ratios=[0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
        engram_layer_ids=[0] if kind == "table" else [],
        engram_max_ngram_size=2,
        engram_n_heads=1,
        engram_vocab_size=max(64, parameters // 256),
        engram_head_dim=256,
        engram_compressed_vocab_size=None,
        dspark_target_layer_ids=[],
    )
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    model = DeepseekV41ForCausalLM(DeepseekV41Config(text_config=config), tokenizer=tokenizer)
    model.cast_parameters(dtype)
    return model


def copied(file: Path, targets: dict[str, Tensor]) -> None:
    """What safetensors does, down to memory that exists."""
    for name, tensor in load_file(file).items():
        targets[name].copy_(tensor)


def measure(
    case: tuple[str, str, torch.dtype, dict[str, Any]], megabytes: int, rounds: int, folder: Path
) -> dict[str, Any]:
    """One row."""
    name, kind, dtype, options = case
    per_parameter = {"FP32": 4, "BF16": 2, "FP8": 1, "FP4": 0.5}[name.split()[0]]
    model = build(kind, int(megabytes * 1e6 / per_parameter), dtype)
    audit = save_released(model, folder / "source", **options)
    (file,) = (folder / "source" / name for name in audit.files)
    targets = {stored: tensor.clone() for stored, tensor in load_file(file).items()}
    written = 0

    def save() -> None:
        nonlocal written
        written += 1
        save_released(model, folder / f"copy{written}", **options)
        for path in (folder / f"copy{written}").iterdir():
            path.unlink()

    runs: dict[str, Callable[[], Any]] = {
        "fresh": lambda: load_file(file, backend="pread"),
        "copied": lambda: copied(file, targets),
        "load": lambda: load_released(model, folder / "source", verify=False),
        "checked": lambda: load_released(model, folder / "source"),
        "save": save,
    }
    taken: dict[str, list[float]] = {key: [] for key in runs}
    for index in range(rounds + 1):
        for key, run in runs.items():
            begin = time.perf_counter()
            run()
            if index:
                taken[key].append(time.perf_counter() - begin)
    seconds = {key: statistics.median(values) for key, values in taken.items()}
    size = file.stat().st_size
    row: dict[str, Any] = {"case": name, "megabytes": size / 1e6}
    row |= {f"{key}_gb_per_s": size / taken / 1e9 for key, taken in seconds.items()}
    line = f"{name:<22}{size / 1e6:>6.0f}{row['fresh_gb_per_s']:>7.2f}{row['copied_gb_per_s']:>8.2f}"
    for key in ("load", "checked", "save"):
        row |= {f"{key}_of_{base}": seconds[base] / seconds[key] for base in ("fresh", "copied")}
        line += f"{row[f'{key}_gb_per_s']:>9.2f}{row[f'{key}_of_fresh']:>7.2f}x{row[f'{key}_of_copied']:>6.2f}x"
    print(line, flush=True)
    return row


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of each file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = "".join(f"{title:>9}{'fresh':>8}{'copied':>7}" for title in ("load", "checked", "save"))
    print(f"{'format':<22}{'MB':>6}{'fresh':>7}{'copied':>8}{head}")
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, options.megabytes, options.rounds, Path(folder)))
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
