"""What has to stay fp32 is named when it does not. As forward sees it: `tests/distributed/test_precision.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch

from dsv41 import DeepseekV41ForCausalLM
from lightning_modules.training.checks import require_wide_parameters

Factory = Callable[..., DeepseekV41ForCausalLM]

BLOCKS = [f"model.layers.{layer}" for layer in range(6)]
POOLING = "model.layers.1.attn.compressor"  # of ratio 2; the one of layer 4 has ratio 1 and no gate
WIDE = {
    *(f"{block}.{site}_hc.{leaf}" for block in BLOCKS for site in ("attn", "ffn") for leaf in ("fn", "base", "scale")),
    *(f"{block}.attn.core.attn_sink" for block in BLOCKS),
    *(f"{block}.ffn.gate.{leaf}" for block in BLOCKS for leaf in ("bias", "bias_vl")),
    f"{POOLING}.wkv.weight",
    f"{POOLING}.wgate.weight",
    "lm_head.weight",
}


def complaint_about(model: DeepseekV41ForCausalLM) -> str:
    try:
        require_wide_parameters(model)
    except ValueError as error:
        return str(error)
    return ""


def test_each_that_is_narrower_is_named_and_no_other_is_asked_for(tiny_model: Factory) -> None:
    model = tiny_model()
    refused = set()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        whole = tensor.data
        tensor.data = whole.bfloat16()
        if complaint := complaint_about(model):
            assert complaint.startswith(f"parameters and buffers that have to stay fp32: {name} (torch.bfloat16); cast")
            refused.add(name)
        tensor.data = whole
    assert refused == WIDE
    assert complaint_about(model) == ""


def test_a_model_that_is_cast_as_a_whole_is_refused(tiny_model: Factory) -> None:
    model = tiny_model()
    for part in model.children():  # the model's own cast leaves them out
        part.bfloat16()
    with pytest.raises(
        ValueError, match=r"have to stay fp32: model.layers.0.attn_hc.fn .torch.bfloat16., .* and 52 more"
    ):
        require_wide_parameters(model)


def test_casts_that_leave_them_out_and_wider_models_are_accepted(tiny_model: Factory) -> None:
    narrow = tiny_model()
    narrow.cast_parameters(torch.bfloat16)
    require_wide_parameters(narrow)
    require_wide_parameters(tiny_model().bfloat16())
    require_wide_parameters(tiny_model().double())
