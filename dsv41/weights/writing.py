"""A model into a folder of safetensors, in slices; a sharded one by all of its ranks, each writing its own files.

Which tensor is in which file, and who writes it, follows from shapes alone, so all ranks know it without asking: an
expert goes to the rank that holds it, everything else to the rank with least to write so far. Rows that the writer does
not hold are sent to it a slice at a time, so nobody holds more than `SLICE_BYTES` of another rank's table (or a row, if
that is more: of stacked experts, a row is a whole one). All ranks go through the files in one order, which keeps sends
and receipts in step; writers of different files work side by side as far as they wait for no rows.

The folder has another name until it is complete. Then come the index and the marker with sizes and checksums, and last
its name: an interrupted export is never mistaken for a whole one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dsv41.files import begin_folder, discard, publish_folder, sha256_of, write_failures_explained
from dsv41.ranks import owned_rows, together
from dsv41.weights.formats import WeightFormat, encode
from dsv41.weights.names import Held, Slot, require_memory, scale_name
from dsv41.weights.tensor_files import Planned, TensorWriter, shard_names, write_index

SLICE_BYTES = 16 * 2**20
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Item:
    """A tensor to be written.

    Attributes:
        name: In the file.
        slot: Where it is in the model.
        dtype: In the file, if it has no format.
        fmt: Quantised format, or None.
    """

    name: str
    slot: Slot
    dtype: torch.dtype
    fmt: WeightFormat | None = None


@dataclass(frozen=True)
class SaveAudit:
    """What was written, by all ranks together.

    Attributes:
        folder: The complete folder.
        files: Names of its safetensors files.
        tensors: Names of the tensors in them, scales included.
        bytes_written: Of all tensors.
    """

    folder: Path
    files: list[str]
    tensors: list[str]
    bytes_written: int


@dataclass
class _Shard:
    """A file, by whom it is written, and what goes into it."""

    writer: int
    items: list[Item] = field(default_factory=list)
    tensors: dict[str, Planned] = field(default_factory=dict)
    nbytes: int = 0


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, or "5GB" (decimal) or "5GiB" (binary).

    Raises:
        ValueError: Neither, or not above 0.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+)\s*([KMG]I?B)", size.strip().upper())
        size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 1:
        raise ValueError("max_shard_size: must be a positive number of bytes, or a text such as '5GB' or '500MB'")
    return size


def require_free(folder: Path, field: str = "folder") -> None:
    """Raise FileExistsError, which names `field`, if there is something at `folder` that an export would overwrite."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{field}: {folder} exists and is not an empty directory; an export overwrites nothing (a tokenizer can be "
            "passed along, or saved afterwards)"
        )


def _planned(item: Item, shape: tuple[int, ...]) -> dict[str, Planned]:
    if item.fmt is None:
        return {item.name: Planned(item.dtype, shape)}
    try:
        codes = item.fmt.code_shape(shape)
    except ValueError as error:
        raise ValueError(f"{item.name}: {error}") from error
    return {
        item.name: Planned(item.fmt.code_dtype, codes),
        scale_name(item.name): Planned(torch.float8_e8m0fnu, item.fmt.scale_shape(shape)),
    }


def _owner(row: int, rows: int, world: int) -> int:
    return row // max(-(-rows // world), 1)


def plan_shards(items: list[Item], held: dict[str, Held], world: int, max_bytes: int) -> list[_Shard]:
    """Distribute tensors over ranks and files.

    Args:
        items: What is to be written.
        held: What this rank has; only shapes count.
        world: Number of ranks.
        max_bytes: Of a file; one tensor with its scales may be more.

    Returns:
        Files in their order: the first of every rank, the second of every rank, ...

    Raises:
        ValueError: A tensor's shape does not suit its format.
    """
    assigned = [0] * world
    shards: list[list[_Shard]] = [[] for _ in range(world)]
    for item in items:
        part = held[item.slot.name]
        if item.slot.expert is not None and part.group is not None:
            writer = _owner(item.slot.expert, part.shape[0], world)
        else:
            writer = min(range(world), key=lambda rank: assigned[rank])
        tensors = _planned(item, item.slot.shape_in(held))
        size = sum(tensor.nbytes for tensor in tensors.values())
        own = shards[writer]
        if not own or own[-1].nbytes + size > max_bytes:
            own.append(_Shard(writer))
        own[-1].items.append(item)
        own[-1].tensors |= tensors
        own[-1].nbytes += size
        assigned[writer] += size
    longest = max(map(len, shards))
    return [own[index] for index in range(longest) for own in shards if index < len(own)]


class _Rows:
    """Rows of tensors, collected on the rank that writes them. All ranks ask for the same ones in the same order."""

    def __init__(self, held: dict[str, Held], group: dist.ProcessGroup | None) -> None:
        self.held = held
        self.group = group
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def _global(self, rank: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)

    def collect(self, slot: Slot, first: int, last: int, writer: int) -> Tensor | None:
        """Rows `first` to `last` - 1 on the writer; None elsewhere."""
        part = self.held[slot.name]
        here = self.rank == writer
        if slot.expert is not None:
            return part.local[slot.expert - part.first][first:last] if here else None
        if part.group is None:
            return part.local[first:last] if here else None
        out = part.local.new_empty(last - first, *part.shape[1:]) if here else None
        for rank in range(self.world):
            rows = owned_rows(part.shape[0], self.world, rank)
            low, high = max(first, rows.start), min(last, rows.stop)
            if low >= high:
                continue
            own = part.local[low - part.first : high - part.first] if rank == self.rank else None
            if out is None:
                if own is not None:
                    dist.send(own.contiguous(), self._global(writer), self.group)
            elif own is not None:
                out[low - first : high - first] = own
            else:
                dist.recv(out[low - first : high - first], self._global(rank), self.group)
        return out


def _row_step(item: Item, shape: tuple[int, ...]) -> int:
    """Rows in a slice: whole blocks of scales."""
    unit = 1 if item.fmt is None else item.fmt.scale_rows
    width = max(math.prod(shape[1:]) * 4, 1)
    return max(unit, SLICE_BYTES // width // unit * unit)


def _write_slice(file: TensorWriter, item: Item, first: int, rows: Tensor) -> None:
    if item.fmt is None:
        file.write(item.name, first, rows.to(item.dtype))
        return
    try:
        codes, scales = encode(rows, item.fmt)
    except ValueError as error:
        raise ValueError(f"{item.name}: {error}") from error
    file.write(item.name, first, codes)
    file.write(scale_name(item.name), first // item.fmt.scale_rows, scales)


def _write_shard(path: Path, shard: _Shard, rows: _Rows, bar: tqdm, failed: bool) -> str | None:
    """Write one file: all ranks take part, the writer returns its checksum.

    A writer that fails, or has `failed` at an earlier file, goes on collecting, or those who send to it would wait for
    ever, and raises at the end.
    """
    file: TensorWriter | None = None
    failure: Exception | None = None
    if rows.rank == shard.writer and not failed:
        try:
            file = TensorWriter(path, shard.tensors)
        except Exception as error:
            failure = error
    for item in shard.items:
        shape = item.slot.shape_in(rows.held)
        step = _row_step(item, shape)
        for first in range(0, shape[0], step):
            values = rows.collect(item.slot, first, min(first + step, shape[0]), shard.writer)
            if file is None or values is None or failure is not None:
                continue
            try:
                _write_slice(file, item, first, values)
            except Exception as error:
                failure = error
        bar.update(sum(tensor.nbytes for tensor in _planned(item, shape).values()))
    if file is not None:
        try:
            if failure is None:
                file.close()
                return sha256_of(path)
            file.abandon()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return None


@torch.no_grad()
def write_folder(
    folder: Path,
    items: list[Item],
    held: dict[str, Held],
    group: dist.ProcessGroup | None,
    max_shard_size: int | str,
    beside: Callable[[Path], None],
) -> SaveAudit:
    """Write tensors and what belongs beside them. All ranks of `group` call it.

    Args:
        folder: Must not exist, or be empty.
        items: What to write.
        held: From `held_tensors`.
        group: From `owners`.
        max_shard_size: See `size_in_bytes`.
        beside: Called by one rank with the folder before it is complete, to write further files.

    Returns:
        What was written.

    Raises:
        FileExistsError: The folder holds something: nothing is ever overwritten.
        ValueError: A size is wrong, a value cannot be encoded (the tensor is named), or the model has no values.
        OSError: A rank could not write. In all cases nothing is left behind, and all ranks raise: those that have met
            no error themselves an `OtherRankError`.
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    folder = folder.resolve()  # a link to an empty directory stays one

    def prepare() -> list[_Shard]:
        require_memory(held)
        require_free(folder)
        return plan_shards(items, held, world, size_in_bytes(max_shard_size))

    shards = together(prepare, group)
    with write_failures_explained(folder):
        partial = together(lambda: begin_folder(folder) if rank == 0 else None, group)
    if group is not None:
        told: list[Path | None] = [None] * world
        dist.all_gather_object(told, partial, group)
        partial = told[0]
    assert partial is not None
    names = shard_names(len(shards))
    rows = _Rows(held, group)
    total = sum(shard.nbytes for shard in shards)

    def write() -> dict[str, str]:
        sums = {}
        failure: Exception | None = None
        quiet = True if rank else None
        with tqdm(
            total=total, desc=f"writing {folder.name}", unit="B", unit_scale=True, disable=quiet, leave=False
        ) as bar:
            for name, shard in zip(names, shards, strict=True):
                try:
                    checksum = _write_shard(partial / name, shard, rows, bar, failure is not None)
                except Exception as error:
                    failure = failure or error
                    continue
                if checksum is not None:
                    sums[name] = checksum
        if failure is not None:
            raise failure
        return sums

    def finish() -> None:
        if rank:
            return
        beside(partial)
        write_index(partial, {name: shard.tensors for name, shard in zip(names, shards, strict=True)}, total)
        for path in partial.iterdir():
            if path.name not in sums:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            folder.rmdir()  # unless something has come into it
        publish_folder(partial, folder, {"tensors": sum(len(s.tensors) for s in shards), "ranks": world}, sums)

    try:
        with write_failures_explained(folder, total):
            sums = together(write, group)
            if group is not None:
                all_sums: list[dict[str, str]] = [{}] * world
                dist.all_gather_object(all_sums, sums, group)
                sums = {name: checksum for part in all_sums for name, checksum in part.items()}
            together(finish, group)
    except BaseException:
        if rank == 0:
            discard(partial)
        raise
    tensors = [name for shard in shards for name in shard.tensors]
    return SaveAudit(folder, names, tensors, total)
