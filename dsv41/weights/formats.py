"""Stored weight formats of the release (ARCHITECTURE 9): codes of 8 or 4 bits with power-of-two scales.

| format | codes | scale, E8M0 | used for |
|---|---|---|---|
| `FP8_BLOCKS` | E4M3, one per byte | one per 32 x 32 block | projections, shared experts |
| `FP8_ROWS` | E4M3, one per byte | one per row and 32 columns | Engram tables |
| `FP4_ROWS` | E2M1, two per byte, the even column in the low nibble | one per row and 32 columns | routed experts |

Blocks at the edges may be partial. A value is code times scale, which is exact in fp32 (below its overflow), so
decoding rounds at most once, to a narrower destination. Encoding takes, per block, the smallest power of two with which
the largest magnitude fits; values that were decoded from a format come back as they were (their codes and scales can
differ: a block of small codes gets a smaller scale).

Shapes: R rows, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.ops.quantization import E2M1_MAX, E4M3_MAX, round_

GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_LARGEST_SCALE = 2.0**127
_SIGN_AND_E4M3 = -0x4080  # bits 15 and 13 to 7 of 16
# Elements worked on at a time, in some 4 MB: fewer would be nearer to a core, but every pass has a cost of its own.
_CHUNK = 1 << 19


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix is stored.

    Attributes:
        name: For messages.
        code_dtype: Of the stored matrix, [R, C / `per_byte`].
        per_byte: Columns in a byte.
        scale_rows: Rows that share a scale.
        largest: Largest magnitude of a code.
        least_normal: Smallest normal magnitude; below it codes are evenly spaced.
        mantissa_bits: Of a code.
        to_half: Factor after which a code's exponent is that of fp16.
    """

    name: str
    code_dtype: torch.dtype
    per_byte: int
    scale_rows: int
    largest: float
    least_normal: float
    mantissa_bits: int
    to_half: float

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the codes of a matrix [R, C].

        Raises:
            ValueError: C is no multiple of `per_byte`.
        """
        rows, columns = shape
        if columns % self.per_byte:
            raise ValueError(f"{columns} columns cannot be stored as {self.name}, {self.per_byte} in a byte")
        return rows, columns // self.per_byte

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a matrix [R, C]."""
        rows, columns = shape
        return -(-rows // self.scale_rows), -(-columns // GROUP)


_E4M3 = (E4M3_MAX, 2.0**-6, 3, 2.0**-8)
FP8_BLOCKS = WeightFormat("fp8 blocks", torch.float8_e4m3fn, 1, GROUP, *_E4M3)
FP8_ROWS = WeightFormat("fp8 rows", torch.float8_e4m3fn, 1, 1, *_E4M3)
FP4_ROWS = WeightFormat("fp4 rows", torch.int8, 2, 1, E2M1_MAX, 1.0, 1, 2.0**-14)


@cache
def _pairs() -> Tensor:
    """What each byte of two E2M1 codes stands for: fp32 [256, 2] as int64 [256], so that one lookup gives both."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)]) * FP4_ROWS.to_half
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).view(torch.int64).squeeze(1)


def _decode_codes_(out: Tensor, fmt: WeightFormat, codes: Tensor, half: Tensor) -> None:
    """Write what `codes` stand for, times `fmt.to_half`, to `out` (fp32, CPU, contiguous). `half`: int16 scratch."""
    if fmt.per_byte == 2:
        index = codes.reshape(-1).view(torch.uint8).int()
        torch.index_select(_pairs(), 0, index, out=out.view(torch.int64).view(-1))
        return
    # E4M3 has a part of the bits of fp16, with another bias; torch's own cast on a CPU takes several times as long.
    signed = codes.view(torch.int8)
    if signed.bitwise_and(0x7F).amax() == 0x7F:
        out.copy_(codes).mul_(fmt.to_half)  # NaN, which fp16 has elsewhere
        return
    out.copy_(half.copy_(signed).bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_E4M3).view(torch.float16))


def _scale_groups_(out: Tensor, factors: Tensor) -> None:
    """Multiply every 32 columns of `out` [R, C] by one of `factors` [R, ceil(C / 32)], in place."""
    columns = out.shape[1]
    whole = columns - columns % GROUP
    if whole:
        out[:, :whole].unflatten(1, (-1, GROUP)).mul_(factors[:, : whole // GROUP, None])
    if whole < columns:
        out[:, whole:].mul_(factors[:, -1:])


def _can_be_decoded_in_place(target: Tensor) -> bool:
    plain = target.dtype == torch.float32 and target.device.type == "cpu" and target.is_contiguous()
    return plain and target.storage_offset() % 2 == 0  # two values are written as one int64


def decode_(target: Tensor, fmt: WeightFormat, codes: Tensor, scales: Tensor, first_row: int = 0) -> None:
    """Write decoded rows into `target`, in place. Scratch is 4 MB, or what one row needs.

    Args:
        target: Floating [R, C], any floating dtype and device.
        fmt: Format of the codes.
        codes: Of these rows, CPU, `fmt.code_dtype`, [R, C / per_byte].
        scales: CPU, float8_e8m0fnu [S, ceil(C / 32)]: from the scale that the first row has to that of the last.
        first_row: Number of the first row in the whole matrix, which says where a block of rows begins.
    """
    rows, columns = target.shape
    if target.numel() == 0:
        return
    step = max(1, _CHUNK // columns)
    factors = scales.float()
    if fmt.scale_rows > 1:
        skip = first_row % fmt.scale_rows
        factors = factors.repeat_interleave(fmt.scale_rows, 0)[skip : skip + rows]
    # The codes come multiplied by `to_half`; the scales make up for it, unless they are so large that they would
    # overflow where their products do not.
    late = 1.0 if bool(factors.amax() <= _LARGEST_SCALE * fmt.to_half) else 1.0 / fmt.to_half
    if late == 1.0:
        factors = factors / fmt.to_half
    half = torch.empty(min(step, rows), columns, dtype=torch.int16) if fmt.per_byte == 1 else torch.empty(0)
    direct = _can_be_decoded_in_place(target)
    scratch = None if direct else torch.empty(min(step, rows), columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out = target[start:stop] if scratch is None else scratch[: stop - start]
        _decode_codes_(out, fmt, codes[start:stop], half[: stop - start])
        _scale_groups_(out, factors[start:stop])
        if late != 1.0:
            out.mul_(late)
        if scratch is not None:
            target[start:stop].copy_(out)


def encode(values: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows that begin at a block's first row.

    Args:
        values: Floating [R, C], finite in fp32, in which they are taken; C even for FP4.
        fmt: Format to encode in.

    Returns:
        Codes [R, C / per_byte] of `fmt.code_dtype`; scales float8_e8m0fnu [ceil(R / scale_rows), ceil(C / 32)]; on the
        device of `values`.

    Raises:
        ValueError: A value is infinite or NaN, or C is odd for FP4.
    """
    rows, columns = values.shape
    codes = torch.empty(fmt.code_shape((rows, columns)), dtype=fmt.code_dtype, device=values.device)
    scales = torch.empty(fmt.scale_shape((rows, columns)), dtype=torch.uint8, device=values.device)
    per_step = max(1, _CHUNK // max(columns * fmt.scale_rows, 1))  # scales
    for start in range(0, len(scales), per_step):
        own = slice(start * fmt.scale_rows, (start + per_step) * fmt.scale_rows)
        codes[own], scales[start : start + per_step] = _encode_block_rows(values[own], fmt)
    return codes, scales.view(torch.float8_e8m0fnu)


def _encode_block_rows(values: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """`encode` for a few rows; scales as bytes."""
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % GROUP, 0, -rows % fmt.scale_rows))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, fmt.scale_rows))  # [S, scale_rows, groups, GROUP]
    amax = blocks.abs().amax((1, 3))
    if not amax.isfinite().all():
        raise ValueError(f"values: must be finite to be stored as {fmt.name}")
    # Both as mantissa in [1/2, 1) and exponent, since a logarithm or a quotient would round.
    mantissa, exponent = torch.frexp(amax)
    largest, its_exponent = math.frexp(fmt.largest)
    exponent = exponent - its_exponent + (mantissa > largest)
    exponent = torch.where(amax == 0, 0, exponent).clamp_min(-_EXPONENT_BIAS)
    inverse = (_EXPONENT_BIAS - exponent).bitwise_left_shift(23).view(torch.float32)
    scaled = blocks * inverse[:, None, :, None]
    # A code's bits are those of fp16 behind its sign, once the biases agree.
    rounded = round_(scaled.clone(), fmt.least_normal, fmt.largest, fmt.mantissa_bits).copysign_(scaled)
    bits = rounded.mul_(fmt.to_half).half().view(torch.int16)
    sign = bits.bitwise_right_shift(8).bitwise_and_(0x80)
    code = bits.bitwise_and(0x7FFF).bitwise_right_shift_(10 - fmt.mantissa_bits)
    code = code.bitwise_or_(sign if fmt.per_byte == 1 else sign.bitwise_right_shift_(4))
    code = code.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(torch.uint8)
    if fmt.per_byte == 2:
        code = code[:, 0::2] | code[:, 1::2] << 4
    return code.view(fmt.code_dtype), (exponent + _EXPONENT_BIAS).to(torch.uint8)
