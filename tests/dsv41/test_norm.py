"""RMSNorm against an explicit float64 loop, at the released epsilon, and with a single cast at the end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv41.norm import RMSNorm


def by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        rms = math.sqrt(sum(value * value for value in row) / len(row) + eps)
        rows.append([value / rms * gain for value, gain in zip(row, weight.double().tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def make(width: int, eps: float, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(width, eps)
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width, generator=generator) + 0.5)
    return norm.to(dtype)


@pytest.mark.parametrize("eps", [1e-20, 0.7])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_equals_the_formula(eps: float, dtype: torch.dtype, rtol: float) -> None:
    norm = make(7, eps, dtype)
    x = torch.randn(2, 3, 7, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    ours = norm(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), by_hand(x, norm.weight.detach(), eps), rtol=rtol, atol=0)


def test_gradients_equal_finite_differences() -> None:
    norm = make(5, 0.3, torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _weight: norm(x), (x, norm.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_vector_stays_zero_with_finite_gradients(dtype: torch.dtype) -> None:
    norm = make(6, 1e-20, dtype)
    x = torch.zeros(3, 6, dtype=dtype)
    x[1] = torch.arange(6) - 2.0  # one live row between the empty ones
    x.requires_grad_()
    out = norm(x)
    assert torch.equal(out[0], torch.zeros(6, dtype=dtype))
    assert (out[1] != 0).sum() == 5
    out.sum().backward()
    for gradient in (x.grad, norm.weight.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
    assert norm.weight.grad is not None
    assert norm.weight.grad.any()


def test_the_released_epsilon_scales_tiny_vectors_up() -> None:
    # Squares near 1e-16 are far above 1e-20, and far below any of the usual epsilons.
    norm = make(6, 1e-20)
    x = torch.tensor([[3.0, -1.0, 2.0, 5.0, -4.0, 1.0]]) * 1e-8
    torch.testing.assert_close(norm(x), norm(x * 1e8), rtol=1e-3, atol=0)


def test_bf16_is_cast_once_at_the_end() -> None:
    norm = make(96, 1e-20, torch.bfloat16)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, exact = norm(x), by_hand(x, norm.weight.detach(), 1e-20)
    assert ours.dtype == torch.bfloat16
    # Rounding the normed value before the gain, or the scale, would miss the nearest bf16 in many entries. A handful
    # of entries lie so close to the middle of two bf16 numbers that fp32 arithmetic may pick the other one.
    assert (ours != exact.bfloat16()).double().mean() < 1e-3


def test_an_fp32_gain_is_not_rounded_to_the_input() -> None:
    norm = make(96, 1e-20)
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    ours, exact = norm(x), by_hand(x, norm.weight.detach(), 1e-20)
    assert ours.dtype == torch.bfloat16
    assert (ours != exact.bfloat16()).double().mean() < 1e-3
