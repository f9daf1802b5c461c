"""Stored weight formats: bit-equal to the reference, to tables of all codes, and to a search for the nearest code.

The tables are written down here from the formats' definitions, and the encoder is compared with a loop in float64 that
knows no bit trick. Values are compared with their signs, so that -0 is not 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv41.weights import formats as weight_formats
from dsv41.weights.formats import FP4_ROWS, FP8_BLOCKS, FP8_ROWS, WeightFormat, decode_, encode

FORMATS = [FP8_BLOCKS, FP8_ROWS, FP4_ROWS]
STORED = {"dense_fp8": FP8_BLOCKS, "engram_fp8": FP8_ROWS, "expert_fp4": FP4_ROWS}


def e4m3(code: int) -> float:
    """Value of an E4M3 code: sign, four bits of exponent with bias 7, three of mantissa; all ones are NaN."""
    sign, exponent, mantissa = (-1.0 if code >> 7 else 1.0), code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = [e4m3(code) for code in range(256)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def table_of(fmt: WeightFormat) -> list[float]:
    """Values by code."""
    return E2M1 if fmt == FP4_ROWS else E4M3


def pack(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """Codes [R, C], one integer each, as they are stored."""
    codes = codes.to(torch.uint8)
    if fmt == FP4_ROWS:
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    return codes.contiguous().view(fmt.code_dtype)


def unpack(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """The inverse of `pack`, int64."""
    whole = codes.view(torch.uint8).long()
    return torch.stack((whole % 16, whole // 16), -1).flatten(1) if fmt == FP4_ROWS else whole


def scales_of(exponents: Tensor) -> Tensor:
    """Scales 2^exponent."""
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def value(codes: Tensor, scales: Tensor, fmt: WeightFormat) -> Tensor:
    """What stored codes stand for, float64, by the table."""
    table = torch.tensor(table_of(fmt), dtype=torch.float64)
    exponents = scales.view(torch.uint8).double() - 127
    rows, columns = unpack(codes, fmt).shape
    spread = exponents.repeat_interleave(fmt.scale_rows, 0).repeat_interleave(32, 1)[:rows, :columns]
    return table[unpack(codes, fmt)] * 2.0**spread


def decoded(codes: Tensor, scales: Tensor, fmt: WeightFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(unpack(codes, fmt).shape, 7.0, dtype=dtype)
    decode_(out, fmt, codes, scales)
    return out


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """Equal with signs of zeros; NaN equals NaN."""
    expected = expected.to(ours.dtype)
    assert ours.shape == expected.shape
    assert torch.equal(ours.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(ours[number], expected[number])
    assert torch.equal(ours[number].signbit(), expected[number].signbit())


def random_stored(fmt: WeightFormat, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of every kind but NaN, and scales over twenty binary orders."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16 if fmt == FP4_ROWS else 256, (rows, columns), generator=generator)
    codes[codes % 128 == 127] = 0
    exponents = torch.randint(-12, 9, fmt.scale_shape((rows, columns)), generator=generator)
    return pack(codes, fmt), scales_of(exponents)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", STORED)
def test_decoding_gives_the_bits_of_the_reference(golden_dir: Path, name: str, dtype: str) -> None:
    golden = load_file(golden_dir / "quantization.safetensors")
    destination = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ours = decoded(golden[f"{name}.weight"], golden[f"{name}.scale"], STORED[name], destination)
    assert torch.equal(ours.float(), golden[f"{name}.dequantized_{dtype}"])


@pytest.mark.parametrize("exponent", [-127, -126, -5, 0, 3, 110, 119, 127])
@pytest.mark.parametrize("fmt", [FP8_ROWS, FP8_BLOCKS], ids=lambda fmt: fmt.name)
def test_every_e4m3_code_has_its_value_at_every_end_of_the_scales(fmt: WeightFormat, exponent: int) -> None:
    for count in (255, 256):  # with and without the NaN of the last code, which takes another path
        codes = torch.arange(256)[None]
        codes[codes == 127] = 0
        codes = codes[:, :count] if count == 255 else torch.arange(256)[None]
        scales = scales_of(torch.full(fmt.scale_shape((1, count)), exponent))
        # Products beyond fp32 are infinite, as they are when computed in it.
        assert_same(decoded(pack(codes, fmt), scales, fmt), value(pack(codes, fmt), scales, fmt))


@pytest.mark.parametrize("exponent", [-127, -126, 0, 113, 114, 127])
def test_every_e2m1_pair_has_its_values_at_every_end_of_the_scales(exponent: int) -> None:
    stored = torch.arange(256).to(torch.uint8)[None].view(torch.int8)
    expected = [E2M1[code] for byte in range(256) for code in (byte & 15, byte >> 4)]
    scales = scales_of(torch.full((1, 16), exponent))
    ours = decoded(stored, scales, FP4_ROWS)
    assert_same(ours, torch.tensor([expected], dtype=torch.float64) * 2.0**exponent)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_large_and_small_scales_do_not_disturb_each_other(fmt: WeightFormat) -> None:
    codes, _ = random_stored(fmt, 64, 64)
    exponents = torch.tensor([[127, -127]]).expand(fmt.scale_shape((64, 64)))
    assert_same(decoded(codes, scales_of(exponents), fmt), value(codes, scales_of(exponents), fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_scale_that_is_nan_makes_its_block_nan(fmt: WeightFormat) -> None:
    codes, scales = random_stored(fmt, 33, 70)
    scales.view(torch.uint8)[0, 1] = 255
    ours = decoded(codes, scales, fmt)
    expected = torch.zeros(33, 70, dtype=torch.bool)
    expected[: fmt.scale_rows, 32:64] = True
    assert torch.equal(ours.isnan(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(1, 2), (7, 30), (31, 32), (32, 34), (65, 96), (40, 70)])
def test_ragged_shapes_and_every_destination(fmt: WeightFormat, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    codes, scales = random_stored(fmt, *shape)
    assert_same(decoded(codes, scales, fmt, dtype), value(codes, scales, fmt))


@pytest.mark.parametrize("fmt", [FP8_BLOCKS, FP8_ROWS], ids=lambda fmt: fmt.name)
def test_an_odd_number_of_columns(fmt: WeightFormat) -> None:
    codes, scales = random_stored(fmt, 5, 37)
    assert_same(decoded(codes, scales, fmt), value(codes, scales, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_slices_at_any_row_are_those_of_the_whole(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_formats, "_CHUNK", 500)  # several steps within a slice
    codes, scales = random_stored(fmt, 100, 66)
    whole = value(codes, scales, fmt)
    bounds = (0, 1, 31, 32, 33, 63, 64, 95, 100)
    for first, last in itertools.combinations(bounds, 2):
        own = scales[first // fmt.scale_rows : -(-last // fmt.scale_rows)]
        out = torch.empty(last - first, 66)
        decode_(out, fmt, codes[first:last], own, first)
        assert_same(out, whole[first:last])


def strided(rows: int, columns: int) -> Tensor:
    return torch.zeros(columns, rows).T


def at_an_odd_place(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows * columns + 1)[1:].view(rows, columns)


def between_columns(rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns + 5)[:, 2:-3]


@pytest.mark.parametrize("make", [strided, at_an_odd_place, between_columns])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_any_layout_of_the_destination(fmt: WeightFormat, make: Callable[[int, int], Tensor]) -> None:
    codes, scales = random_stored(fmt, 40, 70)
    out = make(40, 70)
    decode_(out, fmt, codes, scales)
    assert_same(out.contiguous(), value(codes, scales, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_no_rows_are_no_work(fmt: WeightFormat) -> None:
    codes, scales = random_stored(fmt, 64, 64)
    decode_(torch.empty(0, 64), fmt, codes[:0], scales[:0], 5)


# ---------------------------------------------------------------- encoding


def nearest_code(size: float, table: list[float]) -> int:
    """The code >= 0 whose value is nearest to `size` >= 0; in the middle, the even code."""
    codes = [code for code in range(len(table) // 2) if not math.isnan(table[code])]
    return min(codes, key=lambda code: (abs(table[code] - size), code % 2))


def slow_encode(values: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Codes as integers [R, C] and exponents of scales, by search in float64."""
    rows, columns = values.shape
    table = table_of(fmt)
    largest = max(entry for entry in table if not math.isnan(entry))
    codes = torch.zeros(rows, columns, dtype=torch.int64)
    exponents = torch.zeros(fmt.scale_shape((rows, columns)), dtype=torch.int64)
    for row, column in itertools.product(*map(range, exponents.shape)):
        area = (slice(row * fmt.scale_rows, (row + 1) * fmt.scale_rows), slice(column * 32, column * 32 + 32))
        block = values[area].double()
        amax = float(block.abs().max())
        exponent = next(e for e in range(-127, 128) if amax <= largest * 2.0**e) if amax else 0
        exponents[row, column] = exponent
        found = [nearest_code(abs(v) / 2.0**exponent, table) for v in block.flatten().tolist()]
        signs = block.signbit().long() * (len(table) // 2)
        codes[area] = torch.tensor(found).view(block.shape) + signs
    return codes, exponents


def awkward(rows: int, columns: int) -> Tensor:
    """Normal values, with whole rows of other magnitudes, zeros of both signs, and ties of both formats."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator)
    values *= 2.0 ** torch.randint(-9, 9, (rows, 1), generator=generator)
    values[0] = 0
    values[1] = -0.0
    values[2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values[3, :4] = torch.tensor([17.0, 19.0, -21.0, 448.0])
    values[4] = torch.randint(-200, 200, (columns,), generator=generator) / 8
    return values


@pytest.mark.parametrize("shape", [(8, 64), (40, 38)])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_encoding_takes_the_nearest_codes_and_the_smallest_scales(fmt: WeightFormat, shape: tuple[int, int]) -> None:
    values = awkward(*shape)
    codes, scales = encode(values, fmt)
    expected, exponents = slow_encode(values, fmt)
    assert codes.dtype == fmt.code_dtype
    assert codes.shape == fmt.code_shape(shape)
    assert torch.equal(scales.view(torch.uint8).long() - 127, exponents)
    assert torch.equal(unpack(codes, fmt), expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_scales_are_exact_around_their_powers_of_two_and_at_the_ends_of_fp32(fmt: WeightFormat) -> None:
    largest = torch.tensor(fmt.largest)
    steps = [largest, largest.nextafter(torch.tensor(0.0)), largest.nextafter(torch.tensor(1e9))]
    tops = [float(step) * 2.0**e for step in steps for e in (-127, -126, -120, -1, 0, 1, 100, 119)]
    tops += [2.0**-149, 2.0**-130, 3e-39, float(torch.finfo(torch.float32).max)]
    for top in tops:
        values = torch.zeros(1, 32)
        values[0, :3] = torch.tensor([top, -top / 3, top / 1000])
        codes, scales = encode(values, fmt)
        expected, exponents = slow_encode(values, fmt)
        assert torch.equal(scales.view(torch.uint8).long() - 127, exponents), top
        assert torch.equal(unpack(codes, fmt), expected), top


@pytest.mark.parametrize("shape", [(40, 70), (33, 32)])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_values_of_a_format_come_back_bit_by_bit(fmt: WeightFormat, shape: tuple[int, int]) -> None:
    for seed in range(5):
        codes, scales = random_stored(fmt, *shape, seed=seed)
        values = decoded(codes, scales, fmt)
        again = encode(values, fmt)
        assert_same(decoded(*again, fmt), values)
        assert (again[1].view(torch.uint8) <= scales.view(torch.uint8).clamp_min(127)).all(), "scales only shrink"
        # A second time nothing is left to change.
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(encode(decoded(*again, fmt), fmt), again, strict=True)
        )


@pytest.mark.parametrize("exponent", [-127, -120, 110])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_all_codes_come_back_at_both_ends_of_the_scales(fmt: WeightFormat, exponent: int) -> None:
    count = len(table_of(fmt))
    codes = torch.arange(count)[None]
    codes[codes % 128 == 127] = 0
    scales = scales_of(torch.full(fmt.scale_shape((1, count)), exponent))
    values = decoded(pack(codes, fmt), scales, fmt)
    assert_same(decoded(*encode(values, fmt), fmt), values)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_signs_of_zeros_and_of_what_rounds_to_zero_are_kept(fmt: WeightFormat) -> None:
    values = torch.tensor([[0.0, -0.0, 1e-9, -1e-9, fmt.largest, -fmt.largest]])
    ours = decoded(*encode(values, fmt), fmt)
    assert_same(ours, torch.tensor([[0.0, -0.0, 0.0, -0.0, fmt.largest, -fmt.largest]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_other_dtypes_are_encoded_as_fp32(fmt: WeightFormat, dtype: torch.dtype) -> None:
    values = awkward(40, 38).to(dtype)
    for ours, expected in zip(encode(values, fmt), encode(values.float(), fmt), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_steps_do_not_show(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    values = awkward(100, 66)
    whole = encode(values, fmt)
    monkeypatch.setattr(weight_formats, "_CHUNK", 66 * fmt.scale_rows + 1)
    for ours, expected in zip(encode(values, fmt), whole, strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_what_is_not_finite_is_refused(fmt: WeightFormat, wrong: float) -> None:
    values = torch.zeros(40, 70, dtype=torch.float64)
    values[39, 69] = wrong
    with pytest.raises(ValueError, match=f"^values: must be finite to be stored as {fmt.name}"):
        encode(values, fmt)


def test_an_odd_number_of_columns_has_no_fp4() -> None:
    with pytest.raises(ValueError, match="7 columns cannot be stored as fp4 rows, 2 in a byte"):
        encode(torch.zeros(4, 7), FP4_ROWS)
