"""Dtypes in which sharded models store and compute, and how far bf16 and fp32 are from one process.

`test_precision.py` has the same for whole training steps, by name of every parameter.
"""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import Any

import pytest
import torch
from golden_tiny import Tensors, batch, build, gradients, own_batch, sharded, worst
from ranks import ranks, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from dsv41 import DeepseekV41ForCausalLM
from dsv41.attention import AttentionCore, DeepseekV41Attention
from dsv41.compressor import Compressor
from dsv41.engram import DeepseekV41Engram
from dsv41.engram.table import EngramTable
from dsv41.hyper_connections import HyperConnection
from dsv41.model import DeepseekV41Block, DeepseekV41Model
from dsv41.moe import Experts, Router, SharedExpert
from lightning_modules.parallel.fsdp import ParallelOptions

Dtypes = dict[str, set[torch.dtype]]

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


def watch_dtypes(model: DeepseekV41ForCausalLM, narrow: torch.dtype) -> tuple[Dtypes, Dtypes]:
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


def require_fp32_storage(model: nn.Module, optimizer: Optimizer) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32, name
    for state in optimizer.state.values():
        assert all(entry.dtype == torch.float32 for entry in state.values())


def compute_losses(dtype: torch.dtype, number: int) -> tuple[list[float], Tensors]:
    """Each rank's loss, and the gradient averaged over ranks in fp32, of a plain model that is cast as a whole."""
    model = build(torch.float32)
    model.cast_parameters(dtype)
    losses, total = [], defaultdict[str, Tensor | None](lambda: None)
    for rank in range(number):
        model.zero_grad()
        b = batch("unequal", rank, number)
        loss = model(b.ids, attention_mask=b.mask, labels=b.labels).loss
        loss.backward()
        losses.append(loss.item())
        for name, g in gradients(model).items():
            share = None if g is None else g.float() / number
            earlier = total[name]
            total[name] = share if earlier is None or share is None else earlier + share
    return losses, dict(total)


@pytest.fixture
def whole_losses(world_size: int) -> dict[torch.dtype, tuple[list[float], Tensors]]:
    """Results of `compute_losses` by processes of their own."""
    dtypes = (torch.float32, torch.bfloat16)
    return {dtype: run(compute_losses, None, dtype=dtype, number=world_size)[0] for dtype in dtypes}


def step(mesh: DeviceMesh, options: ParallelOptions) -> tuple[float, Tensors]:
    """Loss and gradients of a step; what is stored and computed has the dtypes that it should have."""
    own = own_batch("unequal")
    model = sharded(mesh, options, torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    require_fp32_storage(model, optimizer)
    seen, expected = watch_dtypes(model, torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32)
    out = model(own.ids, attention_mask=own.mask, labels=own.labels)
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    wrong = {name: (seen.get(name), dtypes) for name, dtypes in expected.items() if seen.get(name) != dtypes}
    assert not wrong, wrong
    found = gradients(model)
    optimizer.step()
    require_fp32_storage(model, optimizer)
    return out.loss.item(), found


@ranks(2)
def test_float32(mesh: DeviceMesh, rank: int, whole_losses: dict[torch.dtype, tuple[list[float], Tensors]]) -> None:
    """Without mixed precision everything is fp32, stored and computed; rounding alone separates it from one process."""
    losses, expected = whole_losses[torch.float32]
    loss, found = step(mesh, ParallelOptions())
    assert abs(loss - losses[rank]) <= 1e-6
    assert worst(found, expected) <= 1e-5


@ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_bf16(
    mesh: DeviceMesh, rank: int, recompute: bool, whole_losses: dict[torch.dtype, tuple[list[float], Tensors]]
) -> None:
    """bf16 changes the loss a little, with the dtypes of the table and fp32 storage throughout.

    It is the loss of a plain model whose parameters are cast, with those left out that stay fp32; the gradients too,
    apart from the rounding of those sums that one of the two makes in bf16.
    """
    loss, found = step(mesh, ParallelOptions(mixed_precision="bf16", activation_checkpointing=recompute))
    assert abs(loss - whole_losses[torch.float32][0][rank]) <= 2e-2
    losses, expected = whole_losses[torch.bfloat16]
    assert abs(loss - losses[rank]) <= 1e-5
    assert worst(found, expected) <= 1e-2
