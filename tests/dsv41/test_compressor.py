"""The compressor against an explicit float64 loop: grouping, gate softmax, precision, masks and short sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import BackendConfig, DeepseekV41Config
from dsv41.attention import AttentionState, DeepseekV41Attention
from dsv41.compressor import Compressor
from dsv41.ops import dense_attention

MakeConfig = Callable[..., DeepseekV41Config]


def make(tiny_config: MakeConfig, ratio: int, hidden: int = 10, width: int = 16) -> Compressor:
    config = tiny_config(hidden_size=hidden, head_dim=width).text_config
    compressor = Compressor(config, ratio)
    generator = torch.Generator().manual_seed(ratio)
    with torch.no_grad():
        for name, parameter in compressor.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.add_(1.0 if name.startswith("norm") else 0.0)
    return compressor


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(entry * value for entry, value in zip(row, vector, strict=True)) for row in matrix]


def pooled_by_hand(compressor: Compressor, x: Tensor, ratio: int) -> list[list[list[float]]]:
    """Pooled values before the norm, [B][T][D]."""
    wkv = compressor.wkv.weight.double().tolist()
    gate = None if compressor.wgate is None else compressor.wgate.weight.double().tolist()
    batch = []
    for row in x.double().tolist():
        groups = []
        for start in range(0, len(row) - ratio + 1, ratio):
            members = row[start : start + ratio]
            values = [product(wkv, member) for member in members]
            logits = [[0.0] * len(wkv)] if gate is None else [product(gate, member) for member in members]
            pooled = []
            for channel in range(len(wkv)):
                shares = [math.exp(logit[channel]) for logit in logits]
                mixed = sum(share * value[channel] for share, value in zip(shares, values, strict=True))
                pooled.append(mixed / sum(shares))
            groups.append(pooled)
        batch.append(groups)
    return batch


def normed(pooled: Tensor, gain: Tensor, eps: float = 1e-20) -> Tensor:
    pooled = pooled.double()
    return pooled / (pooled.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("ratio", "length"), [(1, 7), (2, 6), (2, 7), (3, 6), (3, 7), (3, 8)])
def test_pooling_equals_a_loop_and_drops_an_incomplete_group(
    tiny_config: MakeConfig, ratio: int, length: int, dtype: torch.dtype, tolerance: float
) -> None:
    compressor = make(tiny_config, ratio).to(dtype)
    x = inputs(2, length, 10, dtype=dtype)
    ours = compressor(x)
    assert ours.shape == (2, length // ratio, 16)
    assert ours.dtype == dtype
    pooled = torch.tensor(pooled_by_hand(compressor, x, ratio), dtype=torch.float64)
    expected = normed(pooled, compressor.norm.weight.detach())
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("ratio", [2, 3])
def test_tokens_of_an_incomplete_group_have_no_influence(tiny_config: MakeConfig, ratio: int) -> None:
    compressor = make(tiny_config, ratio)
    x = inputs(1, 3 * ratio - 1, 10).requires_grad_()
    compressor(x).square().mul(inputs(1, 2, 16, seed=9)).sum().backward()
    assert x.grad is not None
    touched = x.grad.abs().sum(-1).squeeze(0) > 0
    assert touched.tolist() == [True] * (2 * ratio) + [False] * (ratio - 1)


@pytest.mark.parametrize("ratio", [2, 3])
def test_large_gate_logits_stay_finite_and_pick_one_token(tiny_config: MakeConfig, ratio: int) -> None:
    compressor = make(tiny_config, ratio)
    assert compressor.wgate is not None
    with torch.no_grad():
        compressor.wgate.weight.mul_(1e4)
    x = inputs(1, 2 * ratio, 10).requires_grad_()
    ours = compressor(x)
    ours.sum().backward()
    values = (x @ compressor.wkv.weight.T).detach().view(2, ratio, 16)
    winner = (x @ compressor.wgate.weight.T).detach().view(2, ratio, 16).argmax(1, keepdim=True)
    expected = normed(values.gather(1, winner).squeeze(1), compressor.norm.weight.detach())
    torch.testing.assert_close(ours.double().squeeze(0), expected, atol=1e-5, rtol=1e-5)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [2, 3])
def test_bf16_input_is_pooled_in_fp32(tiny_config: MakeConfig, ratio: int, weights: torch.dtype) -> None:
    compressor = make(tiny_config, ratio, hidden=48, width=32)
    with torch.no_grad():
        for matrix in (compressor.wkv.weight, compressor.wgate.weight):  # type: ignore[union-attr]
            matrix.mul_(48**-0.5)
    compressor = compressor.to(weights)
    x = inputs(3, 4 * ratio, 48, dtype=torch.bfloat16)
    ours = compressor(x)
    assert ours.dtype == torch.bfloat16
    pooled = torch.tensor(pooled_by_hand(compressor, x, ratio), dtype=torch.float64)
    expected = normed(pooled.bfloat16(), compressor.norm.weight.detach()).bfloat16()
    # Only values in the very middle of two bf16 numbers may fall to the other side; with bf16 products, or a bf16
    # softmax, a large share of the entries differs.
    assert (ours != expected).double().mean() < 0.01


@pytest.mark.parametrize("ratio", [2, 3])
def test_autocast_has_no_say_in_the_pooling(tiny_config: MakeConfig, ratio: int) -> None:
    compressor = make(tiny_config, ratio)
    x = inputs(2, 7, 10)
    with torch.autocast("cpu", torch.bfloat16):
        inside = compressor(x)
    assert torch.equal(inside, compressor(x))


def test_ratio_one_computes_in_the_dtype_of_its_input(tiny_config: MakeConfig) -> None:
    compressor = make(tiny_config, 1).bfloat16()
    assert compressor.wgate is None
    x = inputs(2, 5, 10, dtype=torch.bfloat16)
    products = torch.tensor(pooled_by_hand(compressor, x, 1), dtype=torch.float64).bfloat16()
    expected = normed(products, compressor.norm.weight.detach()).bfloat16()
    assert (compressor(x) != expected).double().mean() < 0.03


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_a_group_is_valid_only_if_all_its_tokens_are(tiny_config: MakeConfig, ratio: int) -> None:
    compressor = make(tiny_config, ratio)
    lengths = [8, 7, 6, 4, 1, 0]
    mask = torch.tensor([[position < length for position in range(8)] for length in lengths])
    expected = [
        [all(start + offset < length for offset in range(ratio)) for start in range(0, 8 - ratio + 1, ratio)]
        for length in lengths
    ]
    ours = compressor.group_mask(mask)
    assert ours.dtype == torch.bool
    assert ours.tolist() == expected


def test_one_dead_token_anywhere_kills_its_group_alone(tiny_config: MakeConfig) -> None:
    compressor = make(tiny_config, 3)
    for dead in range(9):
        mask = torch.ones(1, 10, dtype=torch.bool)
        mask[0, dead] = False
        assert compressor.group_mask(mask).tolist() == [[group != dead // 3 for group in range(3)]]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 2])
def test_a_sequence_shorter_than_the_ratio_attends_to_its_window_only(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, attn: Any, length: int
) -> None:
    config = tiny_config(
        compress_ratios=[3],
        num_hidden_layers=1,
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0],
        candidate_source_layer_id=0,
        engram_layer_ids=[],
        engram_num_embeddings=[],
    ).text_config
    torch.manual_seed(0)
    module = DeepseekV41Attention(config, 0, BackendConfig(attn=attn))
    assert module.compressor is not None
    empty = module.compressor(inputs(2, length, config.hidden_size))
    assert empty.shape == (2, 0, config.head_dim)
    fed: list[Tensor] = []
    core = dense_attention.MASKED_ATTENTION[attn]

    def recorder(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
        fed.extend((kv, mask))
        return core(q, kv, mask, sink)

    monkeypatch.setitem(dense_attention.MASKED_ATTENTION, attn, recorder)
    x = inputs(2, length, config.hidden_size).requires_grad_()
    positions = torch.arange(length).expand(2, -1)
    live = torch.ones(2, length, dtype=torch.bool)
    out, state = module(x, AttentionState(), positions, live)
    out.sum().backward()
    kv, mask = fed
    assert kv.shape == (2, length, config.head_dim)
    assert torch.equal(mask, torch.ones(length, length, dtype=torch.bool).tril().expand(2, -1, -1))
    assert state.compressed_kv is not None
    assert state.selection is not None
    assert state.group_mask is not None
    assert state.compressed_kv.shape == (2, 0, config.head_dim)
    assert state.group_mask.shape == (2, 0)
    assert state.selection.shape == (2, length, 0)
    assert out.shape == x.shape
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad.abs().sum(-1) > 0).all()
    for name, parameter in module.compressor.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
