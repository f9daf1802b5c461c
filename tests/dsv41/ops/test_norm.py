"""RMSNorm against an explicit float64 loop, at the released epsilon, and with a single cast at the end.

Its hand-written backward is compared with autograd through the formula: in bits on the way forward, in float64 on the
way back. What it keeps and what it makes is counted.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dsv41.ops.norm import RMSNorm


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


PRECISIONS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]
# Of a gradient's largest entry: fp32 arithmetic, and one rounding to bf16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, and an incoming gradient."""
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    sizes = torch.randn(*shape[:-1], 1, generator=generator, dtype=torch.float64).mul(3).exp()
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * sizes
    return x.to(dtype), torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_gradients_near(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for mine, wide in zip(ours, exact, strict=True):
        # Rows differ in size, and each row's gradient has its own largest entry.
        error = (mine.double() - wide).abs().amax(-1)
        assert (error <= TOLERANCE[mine.dtype] * wide.abs().amax(-1)).all()


@pytest.mark.parametrize(("dtype", "weight_dtype"), PRECISIONS)
@pytest.mark.parametrize("shape", [(7,), (1, 64), (2, 3, 33), (1, 5, 256), (3, 2, 2, 1280)])
@pytest.mark.parametrize("eps", [1e-20, 0.3])
def test_forward_equals_the_formula_in_every_bit_and_gradients_those_of_autograd(
    dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, ...], eps: float
) -> None:
    norm = make(shape[-1], eps, weight_dtype)
    x, incoming = inputs(shape, dtype)
    x.requires_grad_()
    ours = norm(x)
    assert ours.dtype == dtype
    assert torch.equal(ours, formula(x, norm.weight, eps))
    gradients = torch.autograd.grad(ours, (x, norm.weight), incoming)
    assert [gradient.dtype for gradient in gradients] == [dtype, weight_dtype]
    wide = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    assert_gradients_near(gradients, torch.autograd.grad(formula(*wide, eps), wide, incoming.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_expanded_gradients_and_empty_inputs(dtype: torch.dtype) -> None:
    norm = make(12, 1e-20)
    whole, _ = inputs((6, 5, 24), dtype)
    for x in (whole[:, :, ::2], whole[:, :12].transpose(1, 2)[:, :12, :1].expand(-1, -1, 12), whole[:, 1:4, 12:]):
        x = x.detach().requires_grad_()
        ours = norm(x)
        assert torch.equal(ours, formula(x, norm.weight, 1e-20))
        gradients = torch.autograd.grad(ours.sum(), (x, norm.weight))  # a gradient of one number, expanded
        wide = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
        exact = torch.autograd.grad(formula(*wide, 1e-20).sum(), wide)
        if x.stride(-1) != 0:  # else a row of equal entries: what comes back for x is a difference of equal numbers
            assert_gradients_near(gradients, exact)
        assert_gradients_near(gradients[1:], exact[1:])
    empty = torch.zeros(2, 0, 12, dtype=dtype, requires_grad=True)
    norm(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (2, 0, 12)
    assert norm.weight.grad is not None
    assert not norm.weight.grad.any()


@pytest.mark.parametrize(("dtype", "weight_dtype"), PRECISIONS)
def test_gradients_of_zero_and_tiny_rows_are_those_of_autograd(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    norm = make(6, 1e-20, weight_dtype)
    x = torch.tensor([[0.0], [1e-12], [1e-10], [1e-30]]) * torch.tensor([3.0, -1.0, 2.0, 5.0, -4.0, 1.0])
    x = x.to(dtype).requires_grad_()
    incoming = torch.arange(24.0).view(4, 6).cos().to(dtype)
    gradients = torch.autograd.grad(norm(x), (x, norm.weight), incoming)
    assert all(gradient.isfinite().all() for gradient in gradients)
    # At zero the norm is the linear map weight / sqrt(eps).
    expected = 1e10 * norm.weight.detach().double() * incoming[0].double()
    torch.testing.assert_close(gradients[0][0].double(), expected, rtol=TOLERANCE[dtype], atol=0)
    wide = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    assert_gradients_near(gradients, torch.autograd.grad(formula(*wide, 1e-20), wide, incoming.double()))


@pytest.mark.parametrize(("dtype", "weight_dtype"), PRECISIONS)
def test_kept_for_backward_are_the_input_the_gain_and_one_number_per_row(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    norm = make(33, 1e-20, weight_dtype)
    x, _ = inputs((2, 5, 33), dtype)
    before = x.clone()
    x.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert [tensor.data_ptr() for tensor in kept[:2]] == [x.data_ptr(), norm.weight.data_ptr()]
    assert [(tensor.shape, tensor.dtype) for tensor in kept[2:]] == [
        ((2, 5, 1), torch.promote_types(dtype, torch.float32))
    ]
    assert torch.equal(x, before)


class Fresh(TorchDispatchMode):
    """What ran, and how many tensors of a size were made that are no views of others."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.ran: list[str] = []
        self.made: list[Tensor] = []  # alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append(func._schema.name)
        known = any(out.data_ptr() == tensor.data_ptr() for tensor in self.made)
        if out.numel() == self.elements and not func.is_view and "out" not in (kwargs or {}) and not known:
            self.made.append(out)
        return out


@pytest.mark.parametrize("learns", ["both", "input", "weight"])
def test_backward_makes_one_buffer_and_nothing_that_nobody_asked_for(learns: str) -> None:
    norm = make(33, 1e-20)
    x, incoming = inputs((2, 5, 33), torch.float32)
    x.requires_grad_(learns != "weight")
    norm.weight.requires_grad_(learns != "input")
    wanted = [tensor for tensor in (x, norm.weight) if tensor.requires_grad]
    with Fresh(x.numel()) as forward:
        ours = norm(x)
    assert len(forward.made) == 1
    with Fresh(x.numel()) as backward:
        gradients = torch.autograd.grad(ours, wanted, incoming)
    assert len(backward.made) == 1
    assert ("aten::sum" in backward.ran) == (learns != "input")
    assert ("aten::addcmul_" in backward.ran) == (learns != "weight")
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in wanted]


@pytest.mark.parametrize(("dtype", "weight_dtype"), PRECISIONS)
def test_autocast_and_recomputation_change_nothing(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    norm = make(33, 1e-20, weight_dtype)
    x, incoming = inputs((2, 5, 33), dtype)
    x.requires_grad_()
    with torch.no_grad():
        plain = norm(x)
    assert not plain.requires_grad
    gradients = torch.autograd.grad(norm(x), (x, norm.weight), incoming)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = checkpoint(norm, x, use_reentrant=False)
        recomputed = torch.autograd.grad(again, (x, norm.weight), incoming)
    assert torch.equal(again, plain)
    for ours, first in zip(recomputed, gradients, strict=True):
        assert torch.equal(ours, first)
