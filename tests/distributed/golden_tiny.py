"""Golden-tiny models, whole and sharded, their batches, and comparisons of their tensors.

Deviations of tensors are relative: L2 norm of the difference over L2 norm of the expected tensor, for every parameter
by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dsv41 import DeepseekV41Config, DeepseekV41ForCausalLM
from dsv41.config import IGNORE_INDEX
from dsv41.ops.cross_entropy import causal_lm_loss
from dsv41.ranks import local_rows, owned_rows
from lightning_modules.parallel.fsdp import ParallelOptions, parallelize

Tensors = dict[str, Tensor | None]

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")
LENGTH = 24
# AdamW and the Engram gates, whose slope is without bound near zero, multiply rounding in the 20 steps of
# `test_training` by 1e4 to 1e7, depending on the initial values. With this one of ten seeds, a relative change of
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


def golden_config() -> DeepseekV41Config:
    """Every kind of layer, Engram in layers 1 and 3."""
    raw = json.loads((GOLDEN / "config.json").read_text())
    raw["text_config"].pop("dspark_noise_token_id")
    return DeepseekV41Config(**raw)


def golden_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))


def build(
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = SEED,
    group: dist.ProcessGroup | None = None,
) -> DeepseekV41ForCausalLM:
    """A golden-tiny model, drawn from `seed`; with `group`, its ranks own the tables' rows."""
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return DeepseekV41ForCausalLM(golden_config(), tokenizer=golden_tokenizer(), engram_process_group=group)
    finally:
        torch.set_default_dtype(torch.float32)


def sharded(
    mesh: DeviceMesh, options: ParallelOptions = DEFAULT, dtype: torch.dtype = torch.float64
) -> DeepseekV41ForCausalLM:
    """A newly sharded model, built on the meta device as in training."""
    model = build(dtype, "meta")
    parallelize(Parent(model=model), mesh, options, CPU)
    return model


# ---------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """Ids, 0/1 mask and labels, all int64 [rows, length]."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


CASES = ("unequal", "other shape", "idle rank")


def batch(case: str, rank: int, ranks: int, micro: int = 0) -> Batch:
    """The batch of one of `ranks`; every rank can compute those of the others.

    The number of live tokens differs by rank in every case: padding on the right, and labels without loss at the start.
    N-grams repeat within rows, across rows and across ranks.
    """
    generator = torch.Generator().manual_seed(1000 * micro + rank)
    last = rank == ranks - 1
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


def own_batch(case: str) -> Batch:
    """The batch of this rank."""
    return batch(case, dist.get_rank(), dist.get_world_size())


def joined(batches: list[Batch]) -> list[Batch]:
    """One batch of all rows, if they have one shape: cheaper, and rows must not depend on each other anyway."""
    if len({b.ids.shape for b in batches}) > 1:
        return batches
    return [Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))]


def live_tokens(batches: Iterable[Batch]) -> int:
    return sum(int((b.labels[:, 1:] != IGNORE_INDEX).sum()) for b in batches)


def nats(model: DeepseekV41ForCausalLM, b: Batch) -> Tensor:
    return causal_lm_loss(model(b.ids, attention_mask=b.mask).logits, b.labels).nats


def backward(model: DeepseekV41ForCausalLM, case: str, ranks: int, micros: Iterable[int] = (0,)) -> None:
    """Add the gradient of the mean loss over all live tokens of all `ranks` and micro-batches.

    A sharded model runs its own rank's batches and divides by the tokens per rank, since gradients are averaged over
    ranks; a whole one runs all and divides by all. Gradients of earlier micro-batches stay.
    """
    micros = list(micros)
    is_sharded = isinstance(model, FSDPModule)
    mine = [dist.get_rank()] if is_sharded else list(range(ranks))
    total = live_tokens(batch(case, rank, ranks, micro) for rank in range(ranks) for micro in micros)
    for position, micro in enumerate(micros):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(position == len(micros) - 1)
        for b in joined([batch(case, rank, ranks, micro) for rank in mine]):
            (nats(model, b) * ranks / (total * len(mine))).backward()


def own_backward(model: DeepseekV41ForCausalLM, case: str, micros: Iterable[int] = (0,)) -> Tensors:
    """Gradients of a sharded model, from zero."""
    model.zero_grad(set_to_none=True)
    backward(model, case, dist.get_world_size(), micros)
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


def differing(model: nn.Module, plain: nn.Module) -> int:
    """Number of values in which parameters and buffers differ bitwise (or in dtype, shape, name, device)."""
    found = 0
    for ours, expected in (
        (dict(model.named_parameters()), dict(plain.named_parameters())),
        (dict(model.named_buffers()), dict(plain.named_buffers())),
    ):
        assert list(ours) == list(expected)
        for name, tensor in expected.items():
            mine = ours[name].detach()
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert (whole.dtype, whole.shape, whole.device) == (tensor.dtype, tensor.shape, tensor.device), name
            found += int((whole != tensor).sum())
    assert len(list(plain.parameters())) == PARAMETERS
    assert {name.rpartition(".")[2] for name, _ in plain.named_buffers()} == {
        *("bias", "bias_vl", "token_map", "multipliers", "primes", "offsets")
    }
    return found
