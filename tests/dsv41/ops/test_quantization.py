"""Fake quantisation of the caches: bit-equal to the reference and to exact arithmetic over the enumerated grids.

The oracle lists every value that a format has and picks the nearest by comparison, in rational numbers; it shares no
bit trick with the code under test. A second one, on whole tensors, has torch's own float8 cast and a search in the
grid; against that every bf16 number is rounded, beside ones and as the one that sets its group's scale. The gradient
passes straight through, whatever was rounded or saturated.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsv41.ops.quantization import fake_quantize

FORMATS = ("fp8", "mxfp4", "nvfp4")
GROUP = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
# 8 subnormals of step 2^-9, then 8 mantissas per exponent from -6 on; the last code of E4M3 is NaN, which leaves 448.
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
E4M3 += [Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-6, 9) for m in range(8)]
E4M3 = E4M3[:-1]


@pytest.fixture(scope="module")
def recorded(golden_dir: Path) -> dict[str, Tensor]:
    return load_file(golden_dir / "quantization.safetensors")


def nearest(value: Fraction, grid: list[Fraction]) -> Fraction:
    """Entry of an ascending grid nearest to `value`, ties to the even index, sign kept, saturating."""
    size = abs(value)
    best = min(range(len(grid)), key=lambda index: (abs(grid[index] - size), index % 2))
    return grid[best] if value >= 0 else -grid[best]


def ceil_power_of_two(value: Fraction) -> Fraction:
    power = Fraction(2) ** (math.floor(math.log2(value)) - 1)
    while power < value:
        power *= 2
    return power


def quantize_group(values: list[float], name: str) -> list[float]:
    exact = [Fraction(value) for value in values]
    amax = max(abs(value) for value in exact)
    if name == "fp8":
        scale, grid = ceil_power_of_two(max(amax, Fraction(1, 10000)) / 448), E4M3
    elif name == "mxfp4":
        scale, grid = ceil_power_of_two(max(amax, 6 * Fraction(2) ** -126) / 6), E2M1
    else:
        scale, grid = nearest(max(amax, 6 * Fraction(2) ** -9) / 6, E4M3), E2M1
    return [float(nearest(value / scale, grid) * scale) for value in exact]


def by_hand(x: Tensor, name: str) -> Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        size = GROUP[name]
        rows.append([code for start in range(0, len(row), size) for code in quantize_group(row[start:][:size], name)])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def ceil_powers_of_two(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    powers = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())
    # What the arithmetic on bits makes of the two others; a zero scale then gives zeros beside a NaN.
    return powers.where(x.isfinite(), x).masked_fill(x.isnan(), 0.0)


def plainly(x: Tensor, name: str) -> Tensor:
    """The formats on whole tensors: E4M3 by torch's cast, E2M1 by searching the midpoints of its grid."""
    size, channels = GROUP[name], x.shape[-1]
    groups = F.pad(x.float(), (0, -channels % size)).unflatten(-1, (-1, size))
    amax = groups.abs().amax(-1, keepdim=True)
    if name == "fp8":
        scale = ceil_powers_of_two(amax.clamp_min(1e-4) / 448)
        codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        if name == "mxfp4":
            scale = ceil_powers_of_two(amax.clamp_min(6 * 2.0**-126) / 6)
        else:
            scale = (amax.clamp_min(6 * 2.0**-9) / 6).clamp_max(448).to(torch.float8_e4m3fn).float()
        grid = torch.tensor([float(value) for value in E2M1])
        middle = (grid[1:] + grid[:-1]) / 2
        scaled = (groups / scale).clamp(-6, 6)
        size_of = scaled.abs()
        below, upto = torch.bucketize(size_of, middle, right=False), torch.bucketize(size_of, middle, right=True)
        index = below.where(below % 2 == 0, upto)  # where they differ, it is a tie
        codes = (grid[index] * scaled.sign() + 0.0).masked_fill(scaled.isnan(), float("nan"))  # no -0.0
    return (codes * scale).flatten(-2)[..., :channels].to(x.dtype)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """Equal in every bit, signs of zeros included; a NaN is a NaN."""
    assert ours.dtype == expected.dtype
    assert torch.equal(ours.isnan(), expected.isnan())
    width = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    bits = ours.masked_fill(ours.isnan(), 0.0).view(width)
    assert torch.equal(bits, expected.masked_fill(expected.isnan(), 0.0).view(width))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bf16_number_is_rounded_to_the_bit(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(dtype)
    beside = torch.randn(2**16, 33, generator=torch.Generator().manual_seed(6)).to(dtype)
    beside[:, 0] = every
    beside[:, 1] = 448.0 if name == "fp8" else 6.0  # unless the number is larger, the scale is one
    assert_same_bits(fake_quantize(beside, name), plainly(beside, name))
    among_neighbours = every.view(-1, 64)
    assert_same_bits(fake_quantize(among_neighbours, name), plainly(among_neighbours, name))


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_numbers_of_all_magnitudes_are_rounded_to_the_bit(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    exponents = torch.randint(-149, 130, (4096, 1), generator=generator)
    spread = torch.randint(0, 12, (4096, 48), generator=generator)
    x = (torch.randn(4096, 48, generator=generator).double() * (exponents - spread).double().exp2()).float()
    assert (x == 0).any()
    assert x.isinf().any()
    assert_same_bits(fake_quantize(x, name), plainly(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_is_bit_equal_to_the_reference(recorded: dict[str, Tensor], name: str) -> None:
    ours = fake_quantize(recorded["cache.input"], name)
    assert torch.equal(ours, recorded[f"cache.{name}.fp32"])
    assert not torch.equal(ours, recorded["cache.input"])


@pytest.mark.parametrize("name", FORMATS)
def test_bf16_is_bit_equal_to_the_reference(recorded: dict[str, Tensor], name: str) -> None:
    ours = fake_quantize(recorded["cache.input"].bfloat16(), name)
    assert torch.equal(ours.float(), recorded[f"cache.{name}.bf16"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_partial_last_group_is_bit_equal_to_the_reference(recorded: dict[str, Tensor], name: str) -> None:
    assert recorded["cache_ragged.input"].shape[-1] % GROUP[name] != 0
    assert torch.equal(fake_quantize(recorded["cache_ragged.input"], name), recorded[f"cache_ragged.{name}.fp32"])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-12, 1e-5, 3e-3, 1.0, 700.0, 1e6])
def test_every_group_equals_exact_arithmetic_over_the_grid(name: str, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(int(math.log2(magnitude)) + 50)
    x = torch.randn(3, 2, 41, generator=generator) * magnitude
    x[0, 0, 5] *= 30  # an outlier changes the scale of its own group only
    x[1, 0] = 0.0
    assert torch.equal(fake_quantize(x, name).double(), by_hand(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_change_exactly_at_their_thresholds(name: str) -> None:
    top = 448.0 if name == "fp8" else 6.0
    edges = torch.tensor([top * 2.0**power for power in (-9, -3, 0, 1, 4)])
    edges = torch.cat((edges, torch.nextafter(edges, torch.tensor(1e9)), torch.nextafter(edges, torch.tensor(0.0))))
    x = torch.linspace(-1, 1, 32).repeat(len(edges), 1) * edges.unsqueeze(-1)
    x[:, -1] = edges
    assert torch.equal(fake_quantize(x, name).double(), by_hand(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_group_wise_and_blind_to_other_groups(name: str) -> None:
    size = GROUP[name]
    x = torch.randn(2, 3 * size, generator=torch.Generator().manual_seed(5))
    louder = x.clone()
    louder[:, size : 2 * size] *= 1000
    before, after = fake_quantize(x, name), fake_quantize(louder, name)
    outside = torch.ones(3 * size, dtype=torch.bool)
    outside[size : 2 * size] = False
    assert torch.equal(before[:, outside], after[:, outside])
    assert not torch.equal(before[:, ~outside], after[:, ~outside])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_e2m1_ties_go_to_the_even_grid_index(name: str) -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    values = torch.tensor([*ties, 6.0])  # 6 in the group makes its scale one
    expected = torch.tensor([*ties.values(), 6.0])
    assert torch.equal(fake_quantize(values, name), expected)
    assert torch.equal(fake_quantize(-values, name), -expected)
    above = torch.nextafter(values, torch.tensor(9.0)).clamp(max=6.0)
    assert fake_quantize(above, name).tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0]
    below = torch.nextafter(values, torch.tensor(0.0))
    below[-1] = 6.0
    assert fake_quantize(below, name).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e4m3_ties_go_to_the_even_mantissa() -> None:
    values = torch.tensor([17.0, 19.0, 21.0, 264.0, 280.0, 2.0**-10, 3 * 2.0**-10, 448.0])
    assert fake_quantize(values, "fp8").tolist() == [16.0, 20.0, 20.0, 256.0, 288.0, 0.0, 2.0**-8, 448.0]


def test_nvfp4_saturates_where_its_scale_would_exceed_448() -> None:
    x = torch.tensor([1e4, -1e4, 2688.0, 1000.0, 3.0] + [0.0] * 11)
    assert fake_quantize(x, "nvfp4").tolist() == [2688.0, -2688.0, 2688.0, 896.0, 0.0] + [0.0] * 11


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_is_the_incoming_one(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(3, 40, generator=generator) * 1e4).requires_grad_()  # nvfp4 saturates here
    incoming = torch.randn(3, 40, generator=generator)
    fake_quantize(x, name).backward(incoming)
    assert x.grad is not None
    assert torch.equal(x.grad, incoming)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [64, 40])
def test_nothing_is_kept_for_backward_and_the_input_is_left_alone(name: str, dtype: torch.dtype, channels: int) -> None:
    x = torch.randn(3, channels, generator=torch.Generator().manual_seed(8)).to(dtype).requires_grad_()
    before, version = x.detach().clone(), x._version
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours = fake_quantize(x, name)
    assert ours.requires_grad
    assert not kept
    assert torch.equal(x, before)
    assert x._version == version
    assert ours.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", FORMATS)
def test_layouts_and_empty_inputs(name: str) -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(9)).t()
    assert torch.equal(fake_quantize(x, name), fake_quantize(x.contiguous(), name))
    row = x[:1].expand(5, -1)
    assert torch.equal(fake_quantize(row, name), fake_quantize(row.contiguous(), name))
    for channels in (64, 40):
        empty = torch.zeros(2, 0, channels, requires_grad=True)
        fake_quantize(empty, name).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (2, 0, channels)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_recomputation_change_nothing(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    x = torch.randn(3, 40, generator=generator).to(dtype).requires_grad_()
    incoming = torch.randn(3, 40, generator=generator).to(dtype)
    with torch.no_grad():
        plain = fake_quantize(x, name)
    assert not plain.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = checkpoint(fake_quantize, x, name, use_reentrant=False)
    assert torch.equal(again, plain)
    (gradient,) = torch.autograd.grad(again, x, incoming)
    assert torch.equal(gradient, incoming)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_pass_changes_nothing(name: str, dtype: torch.dtype) -> None:
    # Magnitudes of normal E4M3 scales: a subnormal NVFP4 scale has too few bits to find itself again.
    x = (torch.randn(16, 80, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    once = fake_quantize(x, name)
    assert not torch.equal(once, x)
    assert torch.equal(fake_quantize(once, name), once)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_is_kept_and_the_arithmetic_is_fp32(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(4)).bfloat16().to(dtype)
    ours = fake_quantize(x, name)
    assert ours.dtype == dtype
    assert torch.equal(ours, fake_quantize(x.float(), name).to(dtype))


def test_an_unknown_format_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^name: must be one of \['fp8', 'mxfp4', 'nvfp4'\], got 'int8'"):
        fake_quantize(torch.zeros(4), "int8")
