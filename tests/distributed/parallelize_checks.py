"""Run by `test_parallelize.py` on several ranks: compares sharded models with one process that holds everything.

    torchrun --nproc-per-node W parallelize_checks.py RESULT.json

Each check returns the worst deviation over its cases on this rank; rank 0 writes, for every check, the list over ranks.
A check that raises ends the run. Deviations of tensors are relative: L2 norm of the difference over L2 norm of the
expected tensor, for every parameter by itself.

The oracle is a plain model that runs the batches of all ranks, as one batch if their shapes allow. It never
communicates, so its tasks are dealt out: each rank runs some of them, side by side, and all ranks get all results.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from launched import run
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.attention import AttentionCore, DeepseekV41Attention
from dsv41.compressor import Compressor
from dsv41.config import IGNORE_INDEX
from dsv41.engram import DeepseekV41Engram
from dsv41.engram.table import EngramTable
from dsv41.hyper_connections import HyperConnection
from dsv41.model import DeepseekV41Block, DeepseekV41Model
from dsv41.moe import Experts, Router, SharedExpert
from dsv41.ops.cross_entropy import causal_lm_loss
from dsv41.ranks import local_rows, owned_rows
from lightning_modules.parallel.fsdp import ParallelOptions, parallelize

T = TypeVar("T")
Tensors = dict[str, Tensor | None]
Dtypes = dict[str, set[torch.dtype]]

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")
LENGTH = 24
# AdamW and the Engram gates, whose slope is without bound near zero, multiply rounding in the 20 steps of
# `check_training` by 1e4 to 1e7, depending on the initial values. With this one of ten seeds, a relative change of
# 1e-15 in all parameters stays below 1e-10 on 2 and on 3 ranks.
SEED = 9
PARAMETERS = 166  # of golden-tiny: none may be left out of a comparison
UNTRAINED = 12  # parameters of indexers, which get no gradient since a selection passes none
DEFAULT = ParallelOptions()
RECOMPUTING = ParallelOptions(activation_checkpointing=True)


# ---------------------------------------------------------------------- models


class Parent(nn.Module):
    """Stands for the LightningModule: holds what is trained and is never called."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data_parallel",))


def build(
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = SEED,
    group: dist.ProcessGroup | None = None,
) -> DeepseekV41ForCausalLM:
    """A golden-tiny model: every kind of layer, Engram in layers 1 and 3."""
    torch.manual_seed(seed)
    raw = json.loads((GOLDEN / "config.json").read_text())
    raw["text_config"].pop("dspark_noise_token_id")
    tokenizer = Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return DeepseekV41ForCausalLM(DeepseekV41Config(**raw), tokenizer=tokenizer, engram_process_group=group)
    finally:
        torch.set_default_dtype(torch.float32)


def fresh(options: ParallelOptions = DEFAULT, dtype: torch.dtype = torch.float64) -> DeepseekV41ForCausalLM:
    """A newly sharded model, built on the meta device as in training."""
    model = build(dtype, "meta")
    parallelize(Parent(model=model), mesh(), options, CPU)
    return model


@cache
def sharded(options: ParallelOptions) -> DeepseekV41ForCausalLM:
    """One float64 model per choice of options, for checks that leave its parameters as they are."""
    return fresh(options)


def alone(tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Results of tasks without communication: each rank runs every W-th one, all ranks get all results."""
    mine = {
        name: task()
        for index, (name, task) in enumerate(tasks.items())
        if index % dist.get_world_size() == dist.get_rank()
    }
    gathered: list[dict[str, T] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: result for part in gathered if part is not None for name, result in part.items()}


# ---------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """Ids, 0/1 mask and labels, all int64 [rows, length]."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


CASES = ("unequal", "other shape", "idle rank")


def batch(case: str, rank: int, micro: int = 0) -> Batch:
    """What one rank gets; every rank can compute those of the others.

    The number of live tokens differs by rank in every case: padding on the right, and labels without loss at the start.
    N-grams repeat within rows, across rows and across ranks.
    """
    generator = torch.Generator().manual_seed(1000 * micro + rank)
    last = rank == dist.get_world_size() - 1
    rows, length = (3, LENGTH - 7) if case == "other shape" and last else (2, LENGTH)
    ids = torch.randint(3, 500, (rows, length), generator=generator)
    ids[:, 3:8] = torch.arange(40, 45)  # the same everywhere
    ids[1, 8:13] = ids[0, 5:10]
    ids[-1, 13:] = 77
    mask = torch.ones_like(ids)
    mask[0, length - 3 * (rank + 1) - micro :] = 0
    if case == "idle rank" and last:
        mask[:] = 0
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[1, : 2 + rank] = IGNORE_INDEX
    return Batch(ids, mask, labels)


def joined(batches: list[Batch]) -> list[Batch]:
    """One batch of all rows, if they have one shape: cheaper, and rows must not depend on each other anyway."""
    if len({b.ids.shape for b in batches}) > 1:
        return batches
    return [Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))]


def live_tokens(batches: Iterable[Batch]) -> int:
    return sum(int((b.labels[:, 1:] != IGNORE_INDEX).sum()) for b in batches)


def nats(model: DeepseekV41ForCausalLM, b: Batch) -> Tensor:
    return causal_lm_loss(model(b.ids, attention_mask=b.mask).logits, b.labels).nats


def all_ranks() -> range:
    return range(dist.get_world_size())


def backward(model: DeepseekV41ForCausalLM, case: str, ranks: Iterable[int], micros: Iterable[int] = (0,)) -> None:
    """Add the gradient of the mean loss over all live tokens of all ranks and micro-batches.

    A sharded model runs its own rank's batches and divides by the tokens per rank, since gradients are averaged over
    ranks; the oracle runs all and divides by all. Whoever runs it, gradients of earlier micro-batches stay.
    """
    ranks, micros = list(ranks), list(micros)
    total = live_tokens(batch(case, rank, micro) for rank in all_ranks() for micro in micros)
    for position, micro in enumerate(micros):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(position == len(micros) - 1)
        for b in joined([batch(case, rank, micro) for rank in ranks]):
            (nats(model, b) * dist.get_world_size() / (total * len(ranks))).backward()


def own_backward(model: DeepseekV41ForCausalLM, case: str, micros: Iterable[int] = (0,)) -> Tensors:
    """Tensors of a sharded model, from zero."""
    model.zero_grad(set_to_none=True)
    backward(model, case, [dist.get_rank()], micros)
    return gradients(model)


# ---------------------------------------------------------------------- comparison


def gradients(model: nn.Module) -> Tensors:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def values(model: nn.Module) -> Tensors:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def deviations(ours: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative L2 deviation of each sharded tensor from the whole expected one; both have none of the same tensors.

    Each rank compares its own rows, so that rows at a wrong place are noticed too.
    """
    assert list(ours) == list(expected)
    assert len(ours) == PARAMETERS
    names, squares = [], []
    for name, whole in expected.items():
        mine = ours[name]
        assert (mine is None) == (whole is None), name
        if mine is None or whole is None:
            continue
        assert isinstance(mine, DTensor), name
        assert mine.shape == whole.shape, name
        local, first = local_rows(mine)
        assert len(local) == len(owned_rows(len(whole), dist.get_world_size(), dist.get_rank())), name
        names.append(name)
        squares.append((local.double() - whole.double()[first : first + len(local)]).square().sum())
    total = torch.stack(squares)
    dist.all_reduce(total)
    norms = torch.tensor([whole.double().norm() for whole in expected.values() if whole is not None])
    assert (norms > 0).all(), "a tensor of zeros has no relative deviation"
    return dict(zip(names, (total.sqrt() / norms).tolist(), strict=True))


def worst(ours: Tensors, expected: Tensors) -> float:
    return max(deviations(ours, expected).values())


def _oracle_gradient(case: str, micros: Iterable[int] = (0,)) -> Tensors:
    model = build()
    backward(model, case, all_ranks(), micros)
    return gradients(model)


@cache
def oracle_gradients() -> dict[str, Tensors]:
    """By case, and "accumulated" over four micro-batches."""
    tasks = {case: partial(_oracle_gradient, case) for case in CASES}
    found = alone(tasks | {"accumulated": partial(_oracle_gradient, "unequal", range(4))})
    for gradient in found.values():
        assert len(gradient) == PARAMETERS
        assert sum(g is None for g in gradient.values()) == UNTRAINED
        assert all("indexer" in name for name, g in gradient.items() if g is None)
    return found


# ---------------------------------------------------------------------- checks: values and gradients


def _differing(model: nn.Module, plain: nn.Module) -> int:
    """Number of values in which parameters and buffers differ bitwise (or in dtype, shape, name, device)."""
    differing = 0
    for ours, expected in (
        (dict(model.named_parameters()), dict(plain.named_parameters())),
        (dict(model.named_buffers()), dict(plain.named_buffers())),
    ):
        assert list(ours) == list(expected)
        for name, tensor in expected.items():
            mine = ours[name].detach()
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert (whole.dtype, whole.shape, whole.device) == (tensor.dtype, tensor.shape, tensor.device), name
            differing += int((whole != tensor).sum())
    assert len(list(plain.parameters())) == PARAMETERS
    assert {name.rpartition(".")[2] for name, _ in plain.named_buffers()} == {
        *("bias", "bias_vl", "token_map", "multipliers", "primes", "offsets")
    }
    return differing


def check_initial_values() -> float:
    """Bit-equal to those of a model built by one process, also where the model was built knowing the table's owners."""
    differing = 0
    for dtype in (torch.float64, torch.float32):
        plain = build(dtype)
        groups = (None, dist.group.WORLD) if dtype == torch.float64 else (None,)
        for group in groups:
            model = build(dtype, "meta", group=group)
            parallelize(Parent(model=model), mesh(), DEFAULT, CPU)
            differing += _differing(model, plain)
    return float(differing)


def check_existing_values() -> float:
    """What is not on the meta device keeps its values (loaded weights, say): nothing is drawn again."""
    model = build(seed=5)
    torch.manual_seed(6)
    parallelize(Parent(model=model), mesh(), DEFAULT, CPU)
    return float(_differing(model, build(seed=5)))


def check_tables() -> float:
    """Each rank holds its own rows of a table and no padding; names in checkpoints are those of the plain model."""
    surplus = 0
    plain = build()
    for options in (DEFAULT, ParallelOptions(cpu_offload=True)):
        model = sharded(options)
        tables = [module for module in model.modules() if isinstance(module, EngramTable)]
        assert [table.rows for table in tables] == [408, 484]
        for table in tables:
            assert isinstance(table.weight, DTensor)
            local = table.weight.to_local()
            owned = owned_rows(table.rows, dist.get_world_size(), dist.get_rank())
            assert table.owned == owned
            assert local.untyped_storage().nbytes() == local.nbytes
            surplus += abs(len(local) - len(owned))
        assert list(model.state_dict()) == list(plain.state_dict())
    return float(surplus)


def _gradient_error(options: ParallelOptions, cases: Iterable[str]) -> float:
    model = sharded(options)
    return max(worst(own_backward(model, case), oracle_gradients()[case]) for case in cases)


def check_gradients() -> float:
    """Every parameter, with unequal live tokens, with another batch shape on one rank, with nothing to do on one."""
    return _gradient_error(DEFAULT, CASES)


def check_gradients_activation_checkpointing() -> float:
    """The same when blocks, and with them the exchanges of rows, run again in backward."""
    return _gradient_error(RECOMPUTING, CASES[1:])


def check_gradients_without_resharding() -> float:
    """The same when blocks keep what they gathered."""
    return _gradient_error(ParallelOptions(reshard_after_forward=False), CASES[1:2])


def check_gradients_cpu_offload() -> float:
    """The same with parameters that live in host memory."""
    return _gradient_error(ParallelOptions(cpu_offload=True), CASES[1:2])


def check_accumulation() -> float:
    """Four micro-batches, of which the last alone reduces gradients, sum up; a second step starts afresh."""
    model, expected = sharded(DEFAULT), oracle_gradients()
    found = worst(own_backward(model, "unequal", range(4)), expected["accumulated"])
    return max(found, worst(own_backward(model, "unequal"), expected["unequal"]))


def check_gradient_norm() -> float:
    """The norm over all parameters, sharded by FSDP2 or by owners, is that of the whole gradient."""
    found = [g for g in own_backward(sharded(DEFAULT), "unequal").values() if g is not None]
    norm = get_total_norm(found)
    assert isinstance(norm, DTensor)
    expected = get_total_norm([g for g in oracle_gradients()["unequal"].values() if g is not None])
    return float(abs(norm.full_tensor() - expected) / expected)


def check_evaluation() -> float:
    """Logits without gradients, before any training step too; then training still works."""
    own = batch("other shape", dist.get_rank())
    dense = build().eval()
    with torch.no_grad():
        expected = dense(own.ids, attention_mask=own.mask).logits
    model, found = fresh(), 0.0
    # Evaluation leaves some parameters gathered in the model's own lists; an optimizer knows the sharded ones.
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            logits = model(own.ids, attention_mask=own.mask).logits
        assert not logits.requires_grad
        live = own.mask.bool()
        found = max(found, float((logits - expected)[live].norm() / expected[live].norm()))
        model.train()
        optimizer.zero_grad()
        backward(model, "unequal", [dist.get_rank()])
        found = max(found, worst(gradients(model), oracle_gradients()["unequal"]))
    return found


# ---------------------------------------------------------------------- checks: training


def bare_sgd(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [SGD(parameters, lr=0.1)]


def sgd(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [SGD(parameters, lr=0.1, momentum=0.9)]


def sgd_and_adamw(parameters: list[nn.Parameter]) -> list[Optimizer]:
    """Every second parameter by either; with another number of ranks the other way round, so that none is left out.

    One run for both, because a step takes long when ranks share cores. Each gets one of the two tables.
    """
    first = dist.get_world_size() % 2
    return [
        SGD(parameters[first::2], lr=0.1, momentum=0.9),
        AdamW(parameters[1 - first :: 2], lr=1e-3, eps=1e-8, fused=True),
    ]


@dataclass(frozen=True)
class Run:
    """Some optimizer steps. Thresholds are such that clipping changes every step."""

    optimizers: Callable[[list[nn.Parameter]], list[Optimizer]]
    steps: int
    max_norm: float | None = None
    max_value: float | None = None


RUNS = {
    "clipped by norm": Run(sgd_and_adamw, steps=20, max_norm=0.2),
    "clipped by value": Run(sgd, steps=3, max_value=1e-3),
    # A factor on all gradients is invisible after clipping by norm, and to AdamW; this one shows it.
    "bare": Run(bare_sgd, steps=1),
}


def train(model: DeepseekV41ForCausalLM, run: Run, ranks: Iterable[int], spoiled: Iterable[str] = ()) -> list[float]:
    """Train in place; gradient norms before clipping. `spoiled` names parameters whose gradients count W times."""
    optimizers = run.optimizers(list(model.parameters()))
    ranks, norms = list(ranks), []
    for step in range(run.steps):
        model.zero_grad()
        backward(model, "unequal", ranks, micros=[step % 5])
        found = {name: g for name, g in gradients(model).items() if g is not None}
        for name in spoiled:
            found[name].mul_(dist.get_world_size())
        if run.max_norm is not None:
            norm = clip_grad_norm_(model.parameters(), run.max_norm)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            assert norms[-1] > 1.5 * run.max_norm, f"clipping does not bite in step {step}: {norms}"
        if run.max_value is not None:
            if not isinstance(model, FSDPModule):
                bitten = sum(int((g.abs() > run.max_value).sum()) for g in found.values())
                assert bitten > 1000, f"clipping does not bite in step {step}: {bitten} elements"
            clip_grad_value_(model.parameters(), run.max_value)
        for optimizer in optimizers:
            optimizer.step()
    return norms


def _oracle_run(run: Run) -> tuple[list[float], Tensors]:
    model = build()
    norms = train(model, run, all_ranks())
    return norms, values(model)


@cache
def oracle_runs() -> dict[str, tuple[list[float], Tensors]]:
    return alone({name: partial(_oracle_run, run) for name, run in RUNS.items()})


def _training_error(name: str, options: ParallelOptions = DEFAULT) -> float:
    expected_norms, expected = oracle_runs()[name]
    model = fresh(options)
    norms = train(model, RUNS[name], [dist.get_rank()])
    off = [abs(ours - oracle) / oracle for ours, oracle in zip(norms, expected_norms, strict=True)]
    return max(worst(values(model), expected), *off, 0.0)


def check_training() -> float:
    """All parameters after 20 steps of SGD with momentum, or AdamW, with clipping by norm."""
    return _training_error("clipped by norm")


def check_training_clipped_by_value() -> float:
    """Clipping by value acts on reduced gradients."""
    return _training_error("clipped by value", ParallelOptions(cpu_offload=True))


def check_a_factor_would_show() -> float:
    """Control: one plain step agrees, and where the gradient of a parameter counts W times it no longer does."""
    for name, g in oracle_gradients()["unequal"].items():
        assert g is None or g.norm() > 1e-9, f"{name}: too little gradient for a comparison"
    spoiled = ("model.layers.2.attn.wq_a.weight", "model.layers.3.engram.embed.weight")
    model = fresh()
    train(model, RUNS["bare"], [dist.get_rank()], spoiled)
    for ours, expected, factor in (
        (gradients(model), oracle_gradients()["unequal"], dist.get_world_size() - 1.0),
        (values(model), oracle_runs()["bare"][1], 1e-4),
    ):
        seen = deviations(ours, expected)
        assert min(seen.pop(name) for name in spoiled) > 0.999 * factor
        assert max(seen.values()) < 1e-12
    return _training_error("bare")


# ---------------------------------------------------------------------- checks: dtypes


# Parameters and buffers that a module of a kind sees in its forward: always in fp32, and in the computing dtype.
ALWAYS_FP32: dict[type[nn.Module], list[str]] = {
    HyperConnection: ["fn", "base", "scale"],
    AttentionCore: ["attn_sink"],
    Router: ["bias", "bias_vl"],
    EngramTable: ["weight"],
}
NARROW: dict[type[nn.Module], list[str]] = {
    DeepseekV41Model: ["embed_tokens.weight", "norm.weight"],
    DeepseekV41Attention: ["wq_a.weight", "wo_a.weight", "q_norm.weight"],
    DeepseekV41Engram: ["wkv.weight", "q_weight"],
    Router: ["weight"],
    Experts: ["w1", "w2"],
    SharedExpert: ["w1.weight"],
}


def _watch_dtypes(model: DeepseekV41ForCausalLM, narrow: torch.dtype) -> tuple[Dtypes, Dtypes]:
    """Dtypes that forward, and its repetition in backward, will have seen, by full name; and those it should see.

    Hooks of FSDP2 run before ours, so parameters are then as forward finds them.
    """
    seen: Dtypes = defaultdict(set)
    expected: Dtypes = {}

    def watch(name: str, module: nn.Module, path: str, dtype: torch.dtype) -> None:
        def record(*_: Any) -> None:
            seen[f"{name}.{path}"].add(attrgetter(path)(module).dtype)

        expected[f"{name}.{path}"] = {dtype}
        module.register_forward_pre_hook(record)

    def watch_inputs(name: str, block: nn.Module) -> None:
        def record(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[f"{name} streams"].add(args[0].dtype)
            seen[f"{name} pre_mix"].add(args[1].dtype)

        expected[f"{name} streams"], expected[f"{name} pre_mix"] = {narrow}, {torch.float32}
        block.register_forward_pre_hook(record)

    def watch_head(*_: Any) -> None:
        seen["lm_head.weight"].add(model.lm_head.weight.dtype)

    expected["lm_head.weight"] = {torch.float32}
    model.model.register_forward_hook(watch_head)  # the decoder is done, the head comes next
    for name, module in model.named_modules():
        for kinds, dtype in ((ALWAYS_FP32, torch.float32), (NARROW, narrow)):
            for path in (path for kind, paths in kinds.items() if isinstance(module, kind) for path in paths):
                watch(name, module, path, dtype)
        if isinstance(module, DeepseekV41Block):
            watch_inputs(name, module)
        elif isinstance(module, Compressor):
            pools = module.wgate is not None
            watch(name, module, "wkv.weight", torch.float32 if pools else narrow)
            if pools:
                watch(name, module, "wgate.weight", torch.float32)
    return seen, expected


def _require_fp32_storage(model: nn.Module, optimizer: Optimizer) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
    for state in optimizer.state.values():
        assert all(entry.dtype == torch.float32 for entry in state.values())


def _oracle_losses(dtype: torch.dtype) -> tuple[list[float], Tensors]:
    """Each rank's loss, and the gradient averaged over ranks in fp32, of a model cast as a whole."""
    model = build(torch.float32)
    model.cast_parameters(dtype)
    losses, total = [], defaultdict[str, Tensor | None](lambda: None)
    for rank in all_ranks():
        model.zero_grad()
        b = batch("unequal", rank)
        loss = model(b.ids, attention_mask=b.mask, labels=b.labels).loss
        loss.backward()
        losses.append(loss.item())
        for name, g in gradients(model).items():
            share = None if g is None else g.float() / dist.get_world_size()
            earlier = total[name]
            total[name] = share if earlier is None or share is None else earlier + share
    return losses, dict(total)


@cache
def _mixed_runs() -> dict[str, float]:
    """Dtypes of models trained for a step with and without bf16; worst deviations of losses and gradients."""
    oracle = alone(
        {"none": partial(_oracle_losses, torch.float32), "bf16": partial(_oracle_losses, torch.bfloat16)},
    )
    own = batch("unequal", dist.get_rank())
    found: dict[str, float] = defaultdict(float)
    for options in (
        ParallelOptions(),
        ParallelOptions(mixed_precision="bf16"),
        ParallelOptions(mixed_precision="bf16", activation_checkpointing=True),
    ):
        mixed = options.mixed_precision
        model = fresh(options, torch.float32)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        _require_fp32_storage(model, optimizer)
        seen, expected = _watch_dtypes(model, torch.bfloat16 if mixed == "bf16" else torch.float32)
        out = model(own.ids, attention_mask=own.mask, labels=own.labels)
        assert out.loss.dtype == torch.float32
        out.loss.backward()
        wrong = {name: (seen.get(name), dtypes) for name, dtypes in expected.items() if seen.get(name) != dtypes}
        assert not wrong, wrong
        loss = out.loss.item()
        for key, value in (
            (f"loss {mixed}", abs(loss - oracle["none"][0][dist.get_rank()])),
            (f"loss {mixed} of a cast model", abs(loss - oracle[mixed][0][dist.get_rank()])),
            (f"gradient {mixed}", worst(gradients(model), oracle[mixed][1])),
        ):
            found[key] = max(found[key], value)
        optimizer.step()
        _require_fp32_storage(model, optimizer)
    return dict(found)


def check_float32_loss() -> float:
    """Without mixed precision everything is fp32, stored and computed."""
    return _mixed_runs()["loss none"]


def check_float32_gradients() -> float:
    """Rounding alone separates them from one process."""
    return _mixed_runs()["gradient none"]


def check_bf16_loss() -> float:
    """bf16 changes the loss a little, with the dtypes of the table and fp32 storage throughout."""
    return _mixed_runs()["loss bf16"]


def check_bf16_loss_of_a_cast_model() -> float:
    """It is the loss of a plain model whose parameters are cast, with those left out that stay fp32."""
    return _mixed_runs()["loss bf16 of a cast model"]


def check_bf16_gradients() -> float:
    """The gradients too, apart from the rounding of those sums that one of the two makes in bf16."""
    return _mixed_runs()["gradient bf16"]


# ---------------------------------------------------------------------- checks: refusals and other children


def _refused(pattern: str, action: Callable[[], object]) -> None:
    """`action` raises ValueError on this rank, with the same words on all (numbers of ranks may differ)."""
    with pytest.raises(ValueError, match=pattern) as caught:
        action()
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, re.sub(r"\d+", "N", str(caught.value)))
    assert len(set(told)) == 1, told


def check_refusals() -> float:
    """What nobody shards, what nobody can draw, tables of other owners, and other options the second time."""
    world = dist.get_world_size()
    parent = Parent(model=build(device="meta"))
    parent.temperature = nn.Parameter(torch.ones(()))
    _refused(
        r"^trainable parameters that are sharded by nobody.*: temperature; put them into a child",
        lambda: parallelize(parent, mesh(), DEFAULT, CPU),
    )

    with torch.device("meta"):
        probe = nn.Linear(5, 7)
    undrawn = Parent(model=build(device="meta"), probe=probe)
    _refused(r"^probe: is on the meta device", lambda: parallelize(undrawn, mesh(), DEFAULT, CPU))

    groups = [dist.new_group([rank]) for rank in range(world)]  # every rank owns a table of its own
    fewer = Parent(model=build(device="meta", group=groups[dist.get_rank()]))
    _refused(r"^mesh: must be one-dimensional over the owners", lambda: parallelize(fewer, mesh(), DEFAULT, CPU))

    # Process groups sort their ranks, so another order can only be the mesh's.
    reverse = DeviceMesh("cpu", list(range(world))[::-1], mesh_dim_names=("data_parallel",))
    other = Parent(model=build(device="meta", group=dist.group.WORLD))
    _refused(r"^mesh: must be one-dimensional over the owners", lambda: parallelize(other, reverse, DEFAULT, CPU))

    done = Parent(model=build(device="meta"))
    parallelize(done, mesh(), DEFAULT, CPU)
    _refused(
        r"^model: has been sharded with .*, which cannot be changed to .*activation_checkpointing=True",
        lambda: parallelize(done, mesh(), RECOMPUTING, CPU),
    )
    return 0.0


def check_frozen_parameter_of_the_parent() -> float:
    """A frozen parameter directly on the parent is nobody's business: it stays as it is."""
    parent = Parent(model=build(device="meta"))
    parent.temperature = nn.Parameter(torch.full((3,), 2.5), requires_grad=False)
    before = parent.temperature
    parallelize(parent, mesh(), DEFAULT, CPU)
    assert parent.temperature is before
    assert not isinstance(before, DTensor)
    return float((before - 2.5).abs().max())


def _probe() -> nn.Linear:
    torch.manual_seed(11)
    return nn.Linear(5, 7, dtype=torch.float64)


def _probe_input(rank: int) -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def check_second_child() -> float:
    """Another child is sharded like the model, and its gradient is averaged; one without parameters does not matter."""
    plain, found = _probe(), 0.0
    for rank in all_ranks():
        (plain(_probe_input(rank)).square().mean() / dist.get_world_size()).backward()
    for options in (DEFAULT, ParallelOptions(cpu_offload=True)):
        probe = _probe()
        parallelize(Parent(dropout=nn.Dropout(), probe=probe), mesh(), options, CPU)
        assert isinstance(probe, FSDPModule)
        probe(_probe_input(dist.get_rank())).square().mean().backward()
        for ours, expected in ((probe.weight, plain.weight), (probe.bias, plain.bias)):
            value, gradient = ours.detach(), ours.grad
            assert isinstance(value, DTensor)
            assert isinstance(gradient, DTensor)
            assert expected.grad is not None
            assert torch.equal(value.full_tensor(), expected.detach())
            found = max(found, float((gradient.full_tensor() - expected.grad).norm() / expected.grad.norm()))
    return found


def check_again() -> float:
    """A second call, as for a second ``fit``, changes no parameter and no hook; only a new child is sharded."""
    probe = _probe()
    model = build(device="meta")
    parent = Parent(model=model)
    parallelize(parent, mesh(), DEFAULT, CPU)
    before = {name: id(parameter) for name, parameter in parent.named_parameters()}
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in parent.modules()]
    torch.manual_seed(17)  # another seed: drawing again would show
    parallelize(parent, mesh(), DEFAULT, CPU)
    assert {name: id(parameter) for name, parameter in parent.named_parameters()} == before
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in parent.modules()] == hooks
    parent.add_module("probe", probe)
    parallelize(parent, mesh(), DEFAULT, CPU)
    assert all(isinstance(parameter, DTensor) for parameter in probe.parameters())
    assert {name: id(parameter) for name, parameter in model.named_parameters(prefix="model")} == before
    return float(_differing(model, build()))


def check_again_after_evaluation() -> float:
    """The same after a forward without gradients, as for ``fit`` after ``validate``: parameters that are left."""
    parent = Parent(model=build(device="meta"))
    parallelize(parent, mesh(), DEFAULT, CPU)
    before = {name: id(parameter) for name, parameter in parent.named_parameters()}
    own = batch("unequal", dist.get_rank())
    with torch.no_grad():
        parent.get_submodule("model")(own.ids, attention_mask=own.mask)
    try:
        parallelize(parent, mesh(), DEFAULT, CPU)
    except ValueError:
        return 1.0
    now = {name: id(parameter) for name, parameter in parent.named_parameters()}
    return float(sum(now[name] != number for name, number in before.items()))


def check_again_after_refusal() -> float:
    """Once the reason of a refusal is gone, a second call does what the first did not: values left undrawn."""
    model = build(device="meta")
    parent = Parent(model=model)
    parent.temperature = nn.Parameter(torch.ones(()))
    _refused(r"temperature", lambda: parallelize(parent, mesh(), DEFAULT, CPU))
    parent.temperature.requires_grad_(False)
    parallelize(parent, mesh(), DEFAULT, CPU)
    return float(sum(t.is_meta for t in (*model.parameters(), *model.buffers())))


CHECKS: list[Callable[[], float]] = [
    check_initial_values,
    check_existing_values,
    check_tables,
    check_gradients,
    check_gradients_activation_checkpointing,
    check_gradients_without_resharding,
    check_gradients_cpu_offload,
    check_accumulation,
    check_gradient_norm,
    check_evaluation,
    check_training,
    check_training_clipped_by_value,
    check_a_factor_would_show,
    check_float32_loss,
    check_float32_gradients,
    check_bf16_loss,
    check_bf16_loss_of_a_cast_model,
    check_bf16_gradients,
    check_refusals,
    check_frozen_parameter_of_the_parent,
    check_second_child,
    check_again,
    check_again_after_evaluation,
    check_again_after_refusal,
]


if __name__ == "__main__":
    run(CHECKS)
