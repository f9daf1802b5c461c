"""Muon against torch's, and its iteration against itself in float64. On ranks: `tests/distributed/`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.muon import ShardedMuon, orthogonalised

# torch.optim.Muon's own.
COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
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
def test_in_bf16_it_is_torchs_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_modules.muon.iteration_dtype", lambda matrix: torch.bfloat16)
    for ours, theirs in zip(train(ShardedMuon, shape, dtype), train(torch.optim.Muon, shape, dtype), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_it_is_torchs_up_to_the_rounding_of_bf16(shape: tuple[int, int]) -> None:
    start = draw(shape, 0)
    (ours, _), (theirs, _) = train(ShardedMuon, shape, torch.float32), train(torch.optim.Muon, shape, torch.float32)
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < 0.05 * (theirs - start).norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_the_iteration_rounds_as_its_dtype_does(dtype: torch.dtype, bound: float) -> None:
    """In bf16 the median is 0.015, and the worst of 200 a matrix of small singular values at 0.08."""
    for shape in SHAPES:
        for seed in range(20):
            matrix = draw(shape, seed)
            exact = orthogonalised(matrix.double(), COEFFICIENTS, STEPS, EPS)
            rounded = orthogonalised(matrix.to(dtype), COEFFICIENTS, STEPS, EPS)
            assert rounded.dtype == dtype
            assert (rounded.double() - exact).norm() < bound * exact.norm(), (shape, seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = draw(shape, 3, torch.float64)
    found = orthogonalised(matrix.clone(), COEFFICIENTS, STEPS, EPS)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    diagonal = left.T @ found @ right.T
    assert (diagonal - diagonal.diagonal().diag()).abs().max() < 1e-10
    clear = diagonal.diagonal()[values > 0.05 * values.max()]
    assert ((clear > 0.6) & (clear < 1.3)).all()


def test_a_gradient_of_zero_moves_by_decay_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.zeros(3, 2)
    ShardedMuon([parameter], lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw").step()
    assert torch.allclose(parameter, torch.full((3, 2), 0.95))
