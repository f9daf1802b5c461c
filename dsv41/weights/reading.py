"""A folder of safetensors into a model, straight into its memory, each rank its own rows.

Everything that can be wrong is looked for in the headers first, by all ranks, before a value is overwritten. Then rows
are read in the order of the files. What has the model's own dtype goes straight to its place; of what has to be decoded
or cast, some `SLICE_BYTES` at a time (or a row, if that is more) and the decoder's 4 MB are held beside the model,
whatever the sizes of files and tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from dsv41.files import require_intact
from dsv41.ranks import together
from dsv41.weights.formats import FP4_ROWS, FP8_BLOCKS, FP8_ROWS, WeightFormat, decode_
from dsv41.weights.names import (
    OPTIONAL,
    Held,
    Slot,
    format_of,
    held_tensors,
    module_slots,
    owners,
    released_slots,
    require_memory,
    scale_name,
)
from dsv41.weights.tensor_files import DTYPES, INDEX_NAME, StoredTensor, TensorReader, find_tensors

SLICE_BYTES = 16 * 2**20
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class LoadAudit:
    """What was loaded, on this rank.

    Attributes:
        loaded: Names of the tensors that the model has a place for, as the files have them, scales left out.
        skipped: Names that this model has no place for on purpose (draft layers, vision tower).
        bytes_read: Of the rows that this rank holds and their scales. A comparison of checksums reads more.
        largest_scratch: Bytes of file content held at once beside the model's own memory.
    """

    loaded: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bytes_read: int = 0
    largest_scratch: int = 0


@dataclass(frozen=True)
class _Source:
    """A stored tensor, its format (None: plain floats) and its scales."""

    weight: StoredTensor
    fmt: WeightFormat | None
    scale: StoredTensor | None


def _format_in_file(name: str, shape: tuple[int, ...], stored: StoredTensor) -> WeightFormat | None:
    """How a tensor that the model has in `shape` is stored, or ValueError."""
    usual = format_of(name)
    if stored.dtype in _FLOATS:
        return None
    if stored.dtype == "F8_E4M3" and len(shape) == 2:
        return FP8_ROWS if usual == FP8_ROWS else FP8_BLOCKS
    packable = usual == FP4_ROWS and shape[-1] % FP4_ROWS.per_byte == 0
    if stored.dtype == "I8" and packable:
        return FP4_ROWS
    raise ValueError(
        f"{name}: stored as {stored.dtype} in {stored.file}; it can be one of {', '.join(_FLOATS)}"
        + (", F8_E4M3" if len(shape) == 2 else "")
        + (", I8 (two FP4 values per byte)" if packable else "")
    )


def _source(name: str, shape: tuple[int, ...], stored: dict[str, StoredTensor]) -> _Source:
    """Check one tensor against the shape that the model has for it."""
    weight = stored[name]
    fmt = _format_in_file(name, shape, weight)
    expected = shape if fmt is None else fmt.code_shape(shape)
    if weight.shape != expected:
        raise ValueError(
            f"{name}: shape {list(weight.shape)} in {weight.file}, but the model has {list(shape)}"
            + ("" if fmt is None or expected == shape else f", which is {list(expected)} as {fmt.name}")
        )
    if fmt is None:
        return _Source(weight, None, None)
    scale = stored.get(scale_name(name))
    if scale is None:
        raise ValueError(
            f"{name}: stored as {weight.dtype} in {weight.file}, but its scales {scale_name(name)} are missing"
        )
    if scale.dtype != "F8_E8M0" or scale.shape != fmt.scale_shape(shape):
        raise ValueError(
            f"{scale_name(name)}: {scale.dtype} {list(scale.shape)} in {scale.file} does not fit its weight, "
            f"which needs F8_E8M0 {list(fmt.scale_shape(shape))} ({fmt.name} of {list(shape)})"
        )
    return _Source(weight, fmt, scale)


def match_tensors(
    slots: dict[str, Slot], held: dict[str, Held], stored: dict[str, StoredTensor]
) -> tuple[dict[str, _Source], list[str]]:
    """Find a source for every slot.

    Returns:
        Sources by name, and the names that are skipped on purpose.

    Raises:
        ValueError: Missing, unexpected, wrongly shaped or unreadable tensors, by name.
    """
    skipped = sorted(name for name in stored if name not in slots and name.startswith(OPTIONAL))
    scales = {scale_name(name) for name in slots if name in stored and stored[name].dtype not in _FLOATS}
    missing = sorted(set(slots) - set(stored))
    unexpected = sorted(set(stored) - set(slots) - scales - set(skipped))
    if missing or unexpected:
        folder = next((f" of {tensor.file.parent}" for tensor in stored.values()), "")
        raise ValueError(
            f"checkpoint{folder} does not fit the model: {len(missing)} tensors missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )
    return {name: _source(name, slot.shape_in(held), stored) for name, slot in slots.items()}, skipped


def slots_for(model: nn.Module, stored: dict[str, StoredTensor]) -> dict[str, Slot]:
    """The names that a folder uses: the released ones, or the modules' own as transformers saves them."""
    by_module = module_slots(model)
    by_release = released_slots(model)
    counted = [sum(name in stored for name in slots) for slots in (by_module, by_release)]
    return by_module if counted[0] > counted[1] else by_release


def _read_(target: Tensor, first_row: int, source: _Source, reader: TensorReader) -> None:
    """Fill `target`, rows of a tensor from `first_row` on."""
    weight, fmt, scale = source.weight, source.fmt, source.scale
    if fmt is None and target.is_contiguous():
        # Values one by one, since a row can be large: of stacked experts, it is a whole one.
        first_row *= math.prod(weight.shape[1:])
        weight = replace(weight, shape=(math.prod(weight.shape),))
        target = target.view(-1)
        if target.device.type == "cpu" and target.dtype == DTYPES[weight.dtype]:
            reader.read_into(target, weight, first_row)
            return
    # Decoded rows are wider than stored ones; both should fit.
    width = max(weight.row_bytes, math.prod(target.shape[1:]) * 4, 1)
    step = max(1, SLICE_BYTES // width)
    for start in range(0, len(target), step):
        part = target[start : start + step]
        first, last = first_row + start, first_row + start + len(part)
        rows = reader.rows(weight, first, last)
        if fmt is None:
            part.copy_(rows)
        else:
            assert scale is not None
            scales = reader.rows(scale, first // fmt.scale_rows, -(-last // fmt.scale_rows))
            decode_(part, fmt, rows, scales, first)


def _own_part(slot: Slot, held: Held) -> tuple[Tensor, int]:
    """What this rank has of a slot (no rows, if another has it), and the number of its first row."""
    if slot.expert is None:
        return held.local, held.first
    index = slot.expert - held.first
    return (held.local[index] if 0 <= index < len(held.local) else held.local.new_empty(0, *held.shape[2:])), 0


@torch.no_grad()
def load_released(model: nn.Module, folder: str | Path, *, verify: bool = True) -> LoadAudit:
    """Copy a checkpoint into `model`, in place, keeping the model's dtypes. All ranks of a sharded model call it.

    Args:
        model: `DeepseekV41ForCausalLM`, whole or sharded; each rank reads what it holds.
        folder: Directory of safetensors files, with or without an index, under the released names or those of the
            modules (as transformers saves). FP8 and FP4 weights with scales are decoded (see `weight_formats.py`).
        verify: Compare with the checksums that `save_released` leaves, where there are any. It reads the files once
            more, each rank some of them, which is all of them if the ranks share the folder.

    Returns:
        What was loaded and what was skipped.

    Raises:
        FileNotFoundError: No such directory, or no safetensors in it.
        ValueError: Missing, unexpected, duplicate or wrongly shaped tensors, scales that do not fit, broken or damaged
            files or a bad index; named, on all ranks, and the model is unchanged. What one rank alone meets, here or
            below, is an `OtherRankError` on the others.
        OSError: A file could not be read to its end; the model is overwritten in part.
    """
    folder = Path(folder)
    held = held_tensors(model)
    group = owners(held)

    def check() -> tuple[dict[str, Slot], dict[str, _Source], list[str]]:
        require_memory(held)
        stored = find_tensors(folder)
        slots = slots_for(model, stored)
        sources, skipped = match_tensors(slots, held, stored)
        if verify:
            files = sorted({t.file.name for s in sources.values() for t in (s.weight, s.scale) if t is not None})
            rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
            require_intact(folder, [INDEX_NAME, *files][rank::world])
        return slots, sources, skipped

    slots, sources, skipped = together(check, group)
    audit = LoadAudit(skipped=skipped)

    def read() -> None:
        order = sorted(sources, key=lambda name: (sources[name].weight.file, sources[name].weight.start))
        quiet = True if group is not None and dist.get_rank(group) else None
        total = sum(source.weight.nbytes for source in sources.values())
        with TensorReader() as reader, tqdm(
            total=total, desc=f"loading {folder.name}", unit="B", unit_scale=True, disable=quiet, leave=False
        ) as bar:  # fmt: skip
            for name in order:
                target, first_row = _own_part(slots[name], held[slots[name].name])
                _read_(target, first_row, sources[name], reader)
                audit.loaded.append(name)
                bar.update(sources[name].weight.nbytes)
        audit.bytes_read, audit.largest_scratch = reader.bytes_read, reader.scratch_bytes

    together(read, group)
    return audit
