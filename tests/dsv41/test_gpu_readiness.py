"""What a GPU would run, without one: fake tensors have shapes but no values, and say that they are on a GPU.

A value that the host asks for makes it wait for the device; of a fake tensor, it raises. Nothing on the way through the
model may ask, as long as ids are not validated on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from dsv41 import BackendConfig, DeepseekV41ForCausalLM
from dsv41.ops import experts as expert_module

Models = Callable[..., DeepseekV41ForCausalLM]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """A mode whose tensors have no values, and send the code down the paths of CUDA."""
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    return FakeTensorMode(allow_non_fake_inputs=False)


def step(model: DeepseekV41ForCausalLM, mode: FakeTensorMode, backward: bool = True) -> torch.Tensor:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(mode.from_tensor(parameter.detach())))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, mode.from_tensor(buffer))
    with mode:
        ids = torch.zeros(2, 40, dtype=torch.int64)
        loss: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        if backward:
            loss.backward()
            assert isinstance(model.model.embed_tokens.weight.grad, FakeTensor)
    return loss


@pytest.mark.parametrize(("attn", "recompute"), [("sparse", True), ("sdpa", False)])
def test_a_step_in_bf16_asks_for_no_value(
    tiny_model: Models, fake_gpu: FakeTensorMode, attn: Any, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(BackendConfig(attn=attn, strict_validation=False, gradient_checkpointing=recompute))
    model.cast_parameters(torch.bfloat16)
    grouped = []
    products = expert_module.IMPLEMENTATIONS["grouped"]
    monkeypatch.setitem(expert_module.IMPLEMENTATIONS, "grouped", lambda *a: (grouped.append(1), products(*a))[1])
    loss = step(model, fake_gpu)
    assert isinstance(loss, FakeTensor)
    assert loss.dtype == torch.float32
    assert len(grouped) == (12 if recompute else 6), "the experts ran as grouped products"


def test_the_experts_in_fp32_ask_how_many_tokens_each_has(tiny_model: Models, fake_gpu: FakeTensorMode) -> None:
    model = tiny_model(BackendConfig(strict_validation=False))
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException), match=r"bincount|scalar"):
        step(model, fake_gpu, backward=False)


def test_strict_validation_asks(tiny_model: Models, fake_gpu: FakeTensorMode) -> None:
    model = tiny_model(BackendConfig(strict_validation=True))
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        step(model, fake_gpu, backward=False)
