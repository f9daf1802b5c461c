"""What a learned indexer adds to one attention layer that makes its own keys and selection, forward and backward.

    python benchmarks/indexer_learning.py [--lengths 512 1024 2048 4096] [--topk 64] [--json FILE]

"frozen" is the release; "learned" also makes the indexer's loss over the selected positions and its gradients; "warming
up" attends to all visible positions, and takes the loss over these. The layer is the same in all three. Cases run in
turn, several rounds, one thread; shown are medians of the process's CPU time, and the largest amount of memory held
beyond inputs and parameters (see `measure.py`).

What grows with what: frozen and learned alike with the length, apart from the scores, which are made for all visible
positions and grow with its square (a small one); warming up with the square of the length in time, and in memory by the
selection and its mass, queries x positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import median_seconds, peak_bytes, write_json

from dsv41 import BackendConfig, DeepseekV41TextConfig
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.indexer import LearnedIndexer


def make_layer(indexer: str, length: int, options: argparse.Namespace) -> DeepseekV41Attention:
    """A Full layer."""
    config = DeepseekV41TextConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=2,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=options.topk,
        sliding_window=options.window,
        compress_ratios=[options.ratio],
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0],
        candidate_source_layer_id=-1,
        engram_layer_ids=[],
        max_position_embeddings=length,
        rope_scaling={"rope_type": "default"},
        indexer=indexer,
    )
    torch.manual_seed(0)
    return DeepseekV41Attention(config, 0, BackendConfig())


def step(case: str, length: int, options: argparse.Namespace) -> Callable[[], None]:
    """One forward and backward."""
    layer = make_layer("frozen" if case == "frozen" else "learned", length, options)
    if isinstance(layer.indexer, LearnedIndexer):
        layer.indexer.warming_up = case == "warming up"
    x = torch.randn(1, length, options.hidden, generator=torch.Generator().manual_seed(1), requires_grad=True)
    positions, live = torch.arange(length).unsqueeze(0), torch.ones(1, length, dtype=torch.bool)

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        out, state = layer(x, AttentionState(), positions, live)
        loss = out.square().sum()
        (loss if state.indexer_loss is None else loss + state.indexer_loss).backward()

    return run


def main() -> None:
    """Print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    for name, default in (("hidden", 256), ("topk", 64), ("window", 64), ("ratio", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in options.lengths:
        steps = {case: step(case, length, options) for case in ("frozen", "learned", "warming up")}
        taken = median_seconds(steps, options.rounds)
        for case, run in steps.items():
            row = {"length": length, "case": case, "ms": taken[case] * 1e3, "peak_mb": peak_bytes(run) / 1e6}
            rows.append(row)
            print(
                f"{length:>6} {case:<12}{row['ms']:>10.1f} ms {row['peak_mb']:>9.1f} MB"
                f"{taken[case] / taken['frozen']:>8.2f} of frozen",
                flush=True,
            )
    write_json(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
