"""Time and memory of a whole training step, against another implementation of the same model.

    python benchmarks/train_step.py [--lengths 512 1024 2048] [--vocabulary 8192] [--rounds 3] [--dtype fp32]
                                    [--allocator default tuned] [--growth] [--profile] [--json FILE]

The peer is DeepseekV41ForCausalLM of NVIDIA NeMo AutoModel 0.7.0, which runs on a CPU. It needs an environment of its
own, installed in this order (`--no-deps`, because its dependencies are for GPU clusters and its pins contradict ours):

    python3 -m venv peer && . peer/bin/activate
    pip install "torch>=2.11,<2.14"
    pip install transformers==5.18.0
    pip install nemo-automodel==0.7.0 --no-deps
    pip install pillow
    pip install -e . --no-deps        # this project; benchmarks need only dsv41/, so Lightning stays out
    python benchmarks/train_step.py

Where it cannot be imported, this project is compared with its own dense reference (`attn: eager`) instead.

What is compared. All have the same weights: this project writes its freshly drawn ones as a released checkpoint, the
peer reads it through its own adapter. Before anything is timed, losses and all gradients are compared on two short
sequences, as they are and without the quantisers of both (rounding to FP4 can turn a difference of rounding into
another value), and the run ends if they differ. A step is forward, mean cross-entropy over the vocabulary,
backward, clipping to norm 1, AdamW. Learning rate 0 keeps the weights, and so the function, what they were; the
arithmetic is that of any other rate.

    ours                  this project's defaults and fused AdamW
    peer eager            the peer as it comes: eager attention, a loop over experts, AdamW as torch constructs it
    peer sdpa torch_mm    its best setting: SDPA attention, grouped products of experts, fused AdamW. (`--peer-experts
                          torch` takes its loop over experts instead, or both one after the other.)

How. One thread, the process's CPU time, everybody in turn for `--rounds` rounds after one to warm up, medians; memory
is the largest running sum of what torch's allocator handed out during the step (see `measure.py`): gradients are in,
parameters and optimizer states are not. Everybody in one process, and the table once for each setting of glibc's
allocator, which decides a third of a dense implementation's time: "default" gives every large tensor fresh pages,
"tuned" (MALLOC_* below) keeps them. A claim that holds for the default alone is a claim about malloc. The settings are
read when a process starts, so this script starts itself again for each.

    f+b s     seconds of forward, loss and backward            step s     those and clipping and AdamW
    f+b MB    largest memory during forward and backward       step MB    during the whole step
    and behind them the same four as multiples of ours

What grows with what: the peer in time and memory with the square of the length (dense masks and scores), ours with the
length; gradients and the optimizer with neither, clipping and AdamW only with the number of parameters; the loss with
length times vocabulary in time, and in memory where logits exist whole. At equal length this configuration flatters
sparse attention: a query sees 128 keys where the released one sees 640, so 1024 tokens here are about as sparse as
5120 there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import median_seconds, peak_bytes, write_json
from safetensors.torch import load_file
from step_parts import BACKWARD, labelled, times_of_parts
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedTokenizerFast

from dsv41 import BackendConfig, DeepseekV41Config, DeepseekV41ForCausalLM, DeepseekV41TextConfig
from dsv41.checkpoint import SaveAudit, save_released
from dsv41.weights.names import released_slots

ALLOCATORS = {
    "default": {},
    "tuned": {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "MALLOC_TOP_PAD_": "67108864",
    },
}
# What the heap grows to for a byte that is in use: "tuned" never gives memory back, and large holes do not fit again.
HEAP_PER_BYTE = {"default": 1, "tuned": 3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROWTH_LENGTHS = [512, 1024, 2048, 4096, 8192]
HEADS = 8
# Lengths at which functions are compared: at the first every query sees every key, at the second it selects.
CHECK_LENGTHS = (64, 320)


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """Word-level tokenizer of `size` ids, a quarter of them spellings of others for the Engram to merge."""
    words = [f"w{index}" if index < size - size // 4 else f"W{index - size + size // 4}" for index in range(size)]
    vocabulary = {word: index for index, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])))


def text_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of the text configuration, under the released names that both sides take."""
    ratios: list[int] = options.layers
    sources = [i for i, ratio in enumerate(ratios) if ratio > 0 and (i == 0 or ratios[i - 1] != ratio)]
    # A run of three layers has all kinds: one that owns keys, one that reuses everything, one that selects anew.
    again = [i + 2 for i in sources if ratios[i : i + 3] == [ratios[i]] * 3 and i == sources[-1]]
    return {
        "vocab_size": options.vocabulary,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": HEADS,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 2,
        "n_routed_experts": options.experts,
        "num_experts_per_tok": options.experts_per_token,
        "sliding_window": 64,
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources + again,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": sources[-1] if sources else -1,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "engram_layer_ids": options.engram_layers,
        "engram_vocab_size": 16384,  # 24 columns of about as many rows: 400k
        "engram_head_dim": 32,
        "dspark_noise_token_id": 0,
        "dspark_target_layer_ids": [],
    }


@dataclass
class Contender:
    """A model with its optimizer.

    Attributes:
        name: As printed.
        model: Takes ids and labels, returns an output with `loss`.
        fused: Whether AdamW is torch's fused kernel, or what torch takes by itself.
        scores_held: How many tensors of the size of all heads' scores a layer holds at once, to foresee what fits.
    """

    name: str
    model: nn.Module
    fused: bool
    scores_held: float = 0

    def __post_init__(self) -> None:
        settings = {"fused": True} if self.fused else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, **settings)

    def forward_backward(self, ids: Tensor) -> float:
        """Gradients of the mean loss, from none; the loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.model(ids, labels=ids).loss
        with record_function(f"part::{BACKWARD}"):
            loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """Clip and step."""
        with record_function("part::clipping"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with record_function("part::optimizer"):
            self.optimizer.step()

    def gradient_bytes(self) -> int:
        """Memory of the gradients that there are."""
        return sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)


# ---------------------------------------------------------------------------------------------------- contenders


def our_model(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, attention: str = BackendConfig.attn
) -> DeepseekV41ForCausalLM:
    """This project's model with weights drawn from seed 0."""
    torch.manual_seed(0)
    text = text_fields(options) | {"engram_compressed_vocab_size": None}
    config = DeepseekV41Config(text_config=DeepseekV41TextConfig(**text))
    backend = BackendConfig(attn=attention)  # type: ignore[arg-type]
    model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer)
    model.cast_parameters(DTYPES[options.dtype])
    return model


def peer_model(
    options: argparse.Namespace,
    tokenizer: PreTrainedTokenizerFast,
    ours: DeepseekV41ForCausalLM,
    checkpoint: SaveAudit,
    attention: str,
    experts: str,
) -> nn.Module:
    """The peer with the weights of a released checkpoint."""
    from nemo_automodel.components.models.common import BackendConfig as PeerBackend
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config as PeerConfig
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM as PeerModel

    known = ours.config.text_config  # sizes that came with the tokenizer and the primes
    text = text_fields(options) | {
        "engram_num_embeddings": known.engram_num_embeddings,
        "engram_compressed_vocab_size": known.engram_compressed_vocab_size,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[options.dtype],
    }
    config = PeerConfig(text_config=text, vision_config={"num_hidden_layers": 0}, dtype=text["dtype"])
    backend = PeerBackend(
        attn=attention, linear="torch", rms_norm="torch_fp32", experts=experts, dispatcher="torch", rope_fusion=False
    )
    model = PeerModel(config, backend=backend, tokenizer=tokenizer)
    weights: dict[str, Tensor] = {}
    for file in checkpoint.files:
        weights |= load_file(checkpoint.folder / file)
    native = model.state_dict_adapter.from_hf(weights)
    missing, unexpected = model.load_state_dict(native, strict=False)
    if missing or unexpected:
        raise SystemExit(f"the released checkpoint does not fit the peer: missing {missing}, unexpected {unexpected}")
    return model.train()


def contenders_of(options: argparse.Namespace) -> list[Contender]:
    """Ours first; then the peer's settings, or our dense reference where there is no peer."""
    tokenizer = tokenizer_of(options.vocabulary)
    ours = our_model(options, tokenizer)
    found = [Contender("ours", ours.train(), fused=True)]
    if options.peer_version is None:
        dense = our_model(options, tokenizer, "eager")
        return [*found, Contender("ours, dense", dense.train(), fused=True, scores_held=2.8)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_released(ours, folder)
        build = partial(peer_model, options, tokenizer, ours, checkpoint)
        found.append(Contender("peer eager", build("eager", "torch"), fused=False, scores_held=2.8))
        for experts in options.peer_experts:
            model = build("sdpa", experts)
            found.append(Contender(f"peer sdpa {experts}", model, fused=True, scores_held=2))
    return found


def peer_version() -> str | None:
    """Version of the peer, None where it is not installed. One that is installed and broken is an error."""
    return version("nemo-automodel") if find_spec("nemo_automodel") else None


# ------------------------------------------------------------------------------------------------- the same function


@contextlib.contextmanager
def without_quantisers() -> Iterator[None]:
    """Both sides without their fake quantisation, wherever its function is imported to."""
    replaced = []
    for package, name in (("dsv41", "fake_quantize"), ("nemo_automodel", "quantize_cache")):
        for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == package]:
            if name in vars(module):
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, lambda x, *args, **kwargs: x)
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def released_gradients(contender: Contender) -> dict[str, Tensor]:
    """Gradients under the released names of their parameters."""
    model = contender.model
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not isinstance(model, DeepseekV41ForCausalLM):
        adapter: Any = model.state_dict_adapter
        return adapter.to_hf(gradients)
    slots = {released: slot for released, slot in released_slots(model).items() if slot.name in gradients}
    return {
        released: gradients[slot.name] if slot.expert is None else gradients[slot.name][slot.expert]
        for released, slot in slots.items()
    }


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference by the larger norm: an expert that only one side visited counts as 1."""
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(1e-30))


def compare(contenders: list[Contender], length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Losses and gradients of everybody against ours."""
    ids = draw_ids(length, options.vocabulary)
    losses = [contender.forward_backward(ids) for contender in contenders]
    ours = released_gradients(contenders[0])
    rows = []
    for contender, loss in zip(contenders[1:], losses[1:], strict=True):
        theirs = released_gradients(contender)
        if set(theirs) != set(ours):
            raise SystemExit(f"gradients of other parameters: {sorted(set(theirs) ^ set(ours))[:5]}")
        errors = {name: relative_error(theirs[name].double(), mine.double()) for name, mine in ours.items()}
        worst = max(errors, key=lambda name: errors[name])
        row = {"contender": contender.name, "length": length, "loss": losses[0], "loss_difference": loss - losses[0]}
        row |= {"median": statistics.median(errors.values()), "max": errors[worst], "worst": worst}
        rows.append(row)
    return rows


def check_same_function(contenders: list[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare with and without quantisers; SystemExit if it is not one function.

    In fp32 without quantisers nothing but the order of summation is left, and all gradients of the short sequence have
    to agree. In the long one scores that are nearly tied select another key or expert, here and there, for which the
    bounds are wider; in bf16 many are, so there the loss alone counts.
    """
    rows = []
    for length in CHECK_LENGTHS:
        for quantisers in (True, False):
            with contextlib.nullcontext() if quantisers else without_quantisers():
                found = compare(contenders, length, options)
            for row in found:
                rows.append(row | {"quantisers": quantisers})
                print(
                    f"same function? {row['contender']:<19} length {length:>3}, quantisers "
                    f"{'on: ' if quantisers else 'off:'} loss {row['loss']:.6f}{row['loss_difference']:+.0e}, "
                    f"error of gradients median {row['median']:.0e}, max {row['max']:.0e} ({row['worst']})",
                    flush=True,
                )
                wrong = abs(row["loss_difference"]) > 1e-2
                if options.dtype == "fp32" and not quantisers:
                    short = length == CHECK_LENGTHS[0]
                    wrong |= abs(row["loss_difference"]) > (1e-5 if short else 1e-3)
                    wrong |= row["max" if short else "median"] > (1e-3 if short else 1e-2)
                if wrong:
                    raise SystemExit(f"{row['contender']} computes another function; its time says nothing")
    return rows


# ------------------------------------------------------------------------------------------------------- measuring


def draw_ids(length: int, vocabulary: int) -> Tensor:
    """Token ids int64 [1, length]."""
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(length))


def available_bytes() -> float:
    """Memory that the system could still give away or this process already has; without /proc, no limit is known."""
    info = Path("/proc/meminfo")
    lines = [line for line in info.read_text().splitlines() if "MemAvailable" in line] if info.exists() else []
    if not lines:
        return math.inf
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(lines[0].split()[1]) * 1024 + resident


def score_bytes(length: int, ratios: list[int]) -> int:
    """fp32 scores of all heads and layers over raw and compressed keys."""
    keys = sum(length + (length // ratio if ratio else 0) for ratio in ratios)
    return HEADS * length * keys * 4


def measure_length(length: int, contenders: list[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per contender that fits into memory."""
    ids = draw_ids(length, options.vocabulary)
    room = available_bytes()
    taking_part = []
    for contender in contenders:
        needed = contender.scores_held * score_bytes(length, options.layers) * HEAP_PER_BYTE[options.allocator[0]]
        if needed > room:
            print(f"{length} {contender.name}: needs {needed / 1e9:.0f} GB of {room / 1e9:.0f}, left out", flush=True)
        elif needed > 0 and length > options.longest_dense:
            print(f"{length} {contender.name}: left out by --longest-dense", flush=True)
        else:
            taking_part.append(contender)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for contender in taking_part:
        runs[contender.name, "f+b"] = partial(contender.forward_backward, ids)
        runs[contender.name, "update"] = contender.update
    taken = median_seconds(runs, options.rounds)
    rows: list[dict[str, Any]] = []
    for contender in taking_part:
        forward_backward = peak_bytes(runs[contender.name, "f+b"])
        gradients = contender.gradient_bytes()
        step = max(forward_backward, gradients + peak_bytes(contender.update))
        seconds = taken[contender.name, "f+b"]
        row = {
            "allocator": options.allocator[0],
            "length": length,
            "contender": contender.name,
            "seconds": seconds,
            "step_seconds": seconds + taken[contender.name, "update"],
            "peak_mb": forward_backward / 1e6,
            "step_peak_mb": step / 1e6,
            "gradient_mb": gradients / 1e6,
            "load": os.getloadavg()[0],
        }
        rows.append(row)
        for parameter in contender.model.parameters():
            parameter.grad = None
        print(table_line(row, rows[0]), flush=True)
    return rows


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All lengths under this process's allocator."""
    contenders = contenders_of(options)
    result: dict[str, list[dict[str, Any]]] = {"checks": check_same_function(contenders, options), "steps": []}
    print(TABLE_HEAD, flush=True)
    for length in options.lengths:
        result["steps"] += measure_length(length, contenders, options)
    return result


def run_in_new_process(allocator: str) -> dict[str, list[dict[str, Any]]]:
    """This script again, under settings that are read when a process starts."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    settings |= ALLOCATORS[allocator] | {"OMP_NUM_THREADS": "1"}
    # The profiler announces each start and stop, and each block that is older than itself.
    settings |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [*sys.argv[1:], "--allocator", allocator, "--result", str(result)]
        subprocess.run([sys.executable, __file__, *arguments], env=settings, check=True)
        return json.loads(result.read_text())


# ------------------------------------------------------------------------------------------------------- reporting

TABLE_HEAD = (
    f"{'malloc':<8}{'length':>7} {'':<19}{'f+b s':>9}{'step s':>9}{'f+b MB':>9}{'step MB':>9}"
    f"{'f+b s':>9}{'step s':>9}{'f+b MB':>9}{'step MB':>9}"
)


def table_line(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """A row of the table, with ratios to `ours`."""
    columns = ("seconds", "step_seconds", "peak_mb", "step_peak_mb")
    line = f"{row['allocator']:<8}{row['length']:>7} {row['contender']:<19}"
    line += "".join(f"{row[c]:>9.2f}" for c in columns[:2]) + "".join(f"{row[c]:>9.0f}" for c in columns[2:])
    return line + "".join(f"{row[c] / ours[c]:>8.2f}x" for c in columns)


def print_table(steps: list[dict[str, Any]]) -> None:
    """All rows, and under them what they say in short."""
    ours = {(row["allocator"], row["length"]): row for row in steps if row["contender"] == "ours"}
    print("\n" + TABLE_HEAD)
    for row in steps:
        print(table_line(row, ours[row["allocator"], row["length"]]))
    for allocator, name in dict.fromkeys((row["allocator"], row["contender"]) for row in steps):
        theirs = [row for row in steps if (row["allocator"], row["contender"]) == (allocator, name)]
        if name == "ours":
            continue
        print(f"against {name}, {allocator} allocator, at {' / '.join(str(row['length']) for row in theirs)}:", end="")
        for title, column in (("time", "seconds"), ("memory", "peak_mb"), ("step time", "step_seconds")):
            ratios = [row[column] / ours[allocator, row["length"]][column] for row in theirs]
            print(f"  {title} {' / '.join(f'{ratio:.1f}x' for ratio in ratios)}", end="")
        print(flush=True)


def slope(rows: list[dict[str, Any]], column: str) -> float:
    """Exponent of `column` over the length: least squares in logarithms."""
    return statistics.linear_regression(
        [math.log(row["length"]) for row in rows], [math.log(row[column]) for row in rows]
    ).slope


def growth(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exponents of time and memory from 1024 tokens on (if two lengths are), and over the last two lengths.

    The latter matter because gradients, which do not grow, flatter memory at short lengths.
    """
    rows = []
    for allocator, name in dict.fromkeys((row["allocator"], row["contender"]) for row in steps):
        mine = [row for row in steps if (row["allocator"], row["contender"]) == (allocator, name)]
        long = [row for row in mine if row["length"] >= 1024]
        mine = long if len(long) > 1 else mine
        if len(mine) < 2:
            continue
        row = {"allocator": allocator, "contender": name, "lengths": [row["length"] for row in mine]}
        for title, column in (("time", "seconds"), ("memory", "peak_mb")):
            row |= {title: slope(mine, column), f"{title}_at_the_end": slope(mine[-2:], column)}
        rows.append(row)
        print(
            f"growth {allocator:<8}{name:<19}{row['lengths'][0]:>6} to {row['lengths'][-1]:>5}: "
            f"time S^{row['time']:.2f} (at the end S^{row['time_at_the_end']:.2f}), "
            f"memory S^{row['memory']:.2f} (at the end S^{row['memory_at_the_end']:.2f})",
            flush=True,
        )
    return rows


# -------------------------------------------------------------------------------------------------------- profiling


def profile_parts(contender: Contender, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return the share of each part of a step, from the fastest of `--rounds` profiled steps."""
    ids = draw_ids(length, options.vocabulary)

    def step() -> None:
        contender.forward_backward(ids)
        contender.update()

    step()
    profiles = []
    with labelled(contender.model):
        for _ in range(options.rounds):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                step()
            profiles.append(times_of_parts(profiled.events()))
    forward, backward, kernels = min(profiles, key=lambda times: sum(times[2].values()))
    whole = sum(kernels.values())
    print(f"\n{contender.name}, length {length}: {whole:.0f} ms in the profiler (slower than without)")
    print(f"{'part':<26}{'forward ms':>12}{'backward ms':>12}{'share':>8}")
    rows = []
    for part in sorted(forward | backward, key=lambda part: -forward.get(part, 0.0) - backward.get(part, 0.0)):
        there, back = forward.get(part, 0.0), backward.get(part, 0.0)
        row = {"length": length, "part": part, "forward_ms": there, "backward_ms": back}
        rows.append(row | {"share": (there + back) / whole})
        print(f"{part:<26}{there:>12.1f}{back:>12.1f}{(there + back) / whole:>8.1%}")
    print("operations with most time of their own:")
    for name in sorted(kernels, key=lambda name: -kernels[name])[:16]:
        print(f"  {name:<50}{kernels[name]:>10.1f} ms{kernels[name] / whole:>8.1%}", flush=True)
    return rows


# -------------------------------------------------------------------------------------------------------------- main


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocabulary", type=int, default=8192, help="8192 or, as released, 129280")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 0, 2, 2, 2, 1, 1, 1], help="compression ratios")
    parser.add_argument("--engram-layers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--allocator", choices=ALLOCATORS, nargs="+", default=list(ALLOCATORS))
    parser.add_argument("--peer-experts", choices=["torch", "torch_mm"], nargs="+", default=["torch_mm"])
    parser.add_argument("--growth", action="store_true", help=f"lengths {GROWTH_LENGTHS}, and exponents")
    parser.add_argument("--longest-dense", type=int, default=4096, help="length beyond which only ours is run")
    parser.add_argument("--profile", action="store_true", help="share of each part of our step, and nothing else")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.growth:
        options.lengths = sorted({*GROWTH_LENGTHS, *options.lengths})
    return options


def in_this_process(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What was asked for, under the allocator that this process started with."""
    if options.profile:
        ours = Contender("ours", our_model(options, tokenizer_of(options.vocabulary)).train(), fused=True)
        return {"parts": [row for length in options.lengths for row in profile_parts(ours, length, options)]}
    return measure(options)


def main() -> None:
    """Print tables, and write JSON if asked to."""
    options = parse()
    torch.set_num_threads(1)
    options.peer_version = None if options.profile else peer_version()
    if options.result is not None:
        options.result.write_text(json.dumps(in_this_process(options)))
        return
    options.project_version = version("dsv41-lightning")
    if options.peer_version is None and not options.profile:
        print("no peer (see --help): comparing with this project's own dense reference instead", flush=True)
    results = {}
    for allocator in options.allocator:
        print(f"\n{allocator} allocator", flush=True)
        results[allocator] = run_in_new_process(allocator)
    if options.profile:
        parts = [row | {"allocator": name} for name, result in results.items() for row in result["parts"]]
        write_json(options.json, vars(options), parts)
        return
    steps = [row for result in results.values() for row in result["steps"]]
    print_table(steps)
    exponents = growth(steps)
    checks = [row for result in results.values() for row in result["checks"]]
    settings = vars(options) | {"checks": checks, "growth_exponents": exponents, "environments": ALLOCATORS}
    write_json(options.json, settings, steps)


if __name__ == "__main__":
    main()
