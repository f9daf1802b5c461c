"""Muon of whole matrices is torch's own; what a sharded one takes from torch is its step. On ranks:
`tests/distributed/test_optimizer_rules.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.optim.muon import ShardedMuon, step_from_zero

SHAPES = [(32, 16), (16, 32), (7, 5), (1, 4), (9, 2)]


def draw(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def train(cls: type[torch.optim.Muon], shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    parameter = nn.Parameter(draw(shape, 0, dtype))
    optimizer = cls([parameter], 0.1, 0.2, 0.9, adjust_lr_fn="match_rms_adamw")
    for seed in range(1, 5):
        parameter.grad = draw(shape, seed, dtype)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["momentum_buffer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_whole_matrices_it_is_torchs_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for ours, theirs in zip(train(ShardedMuon, shape, dtype), train(torch.optim.Muon, shape, dtype), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_step_from_zero_turns_a_matrix_into_a_nearly_orthogonal_one(shape: tuple[int, int]) -> None:
    matrix = draw(shape, 3)
    group: dict[str, Any] = dict(torch.optim.Muon([nn.Parameter(matrix)], 0.1, adjust_lr_fn="match_rms_adamw").defaults)
    found = step_from_zero(matrix.clone(), group) / (-0.1 * 0.2 * math.sqrt(max(shape)))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    diagonal = left.T @ found.double() @ right.T
    assert (diagonal - diagonal.diagonal().diag()).abs().max() < 0.1  # bf16 keeps two to three digits
    clear = diagonal.diagonal()[values > 0.05 * values.max()]
    assert ((clear > 0.6) & (clear < 1.3)).all()


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_decay_and_the_step_from_zero_make_torchs_update(nesterov: bool) -> None:
    """As a sharded matrix is updated, without the ranks."""
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov}
    parameter = nn.Parameter(draw((9, 5), 0))
    optimizer = torch.optim.Muon([parameter], adjust_lr_fn="match_rms_adamw", **options)
    value, average = parameter.detach().clone(), torch.zeros(9, 5)
    for seed in range(1, 4):
        gradient = draw((9, 5), seed)
        parameter.grad = gradient.clone()
        optimizer.step()
        average.lerp_(gradient, 0.1)
        start = gradient.lerp(average, 0.9) if nesterov else average
        value.mul_(1 - 0.1 * 0.2).add_(step_from_zero(start.clone(), optimizer.param_groups[0]))
        torch.testing.assert_close(value, parameter.detach(), rtol=1e-6, atol=1e-7)
