"""Folders of safetensors files: what is in them, and bounded slices of it, in and out.

The safetensors library says whether a file is sound. Data is read and written by position, since the library maps or
builds whole files: a table of the release is larger than a machine's memory, and its pages would count as the
process's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8  # of the data, as the library pads its headers


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: The file.
        dtype: As safetensors names it: "BF16", "F8_E4M3", ...
        shape: Of the whole tensor.
        start: Position of its first byte in the file.
        nbytes: Its size.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Size of a row (of the tensor, if it is a scalar)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


class TensorReader:
    """Reads rows of stored tensors, and counts.

    Attributes:
        bytes_read: So far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: tuple[Path, BinaryIO] | None = None
        self._buffers: dict[str, Tensor] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    @property
    def scratch_bytes(self) -> int:
        """Size of the buffers: the largest slice that was asked for, of each stored dtype."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def rows(self, stored: StoredTensor, first: int, last: int) -> Tensor:
        """Rows `first` to `last` - 1, in the stored dtype, on the CPU; overwritten by the next ones of that dtype."""
        needed = (last - first) * stored.row_bytes
        buffer = self._buffers.get(stored.dtype)
        if buffer is None or len(buffer) < needed:
            buffer = self._buffers[stored.dtype] = torch.empty(needed, dtype=torch.uint8)
        out = buffer[:needed].view(DTYPES[stored.dtype]).view(last - first, *stored.shape[1:])
        self.read_into(out, stored, first)
        return out

    def read_into(self, out: Tensor, stored: StoredTensor, first: int) -> None:
        """Fill `out`, contiguous on the CPU and of the stored dtype, with the rows that begin at `first`.

        Raises:
            OSError: The file cannot be read, or has become shorter.
        """
        if out.nbytes == 0:
            return
        if self._open is None or self._open[0] != stored.file:
            self.__exit__()
            self._open = stored.file, stored.file.open("rb", buffering=0)
        view = _bytes_of(out)
        position = stored.start + first * stored.row_bytes
        file = self._open[1]
        done = 0
        while done < len(view):  # the system reads less than 2 GiB at a time
            count = os.preadv(file.fileno(), [view[done:]], position + done)
            if count == 0:
                raise OSError(f"{stored.file}: ends early; it has become shorter since it was opened")
            done += count
        self.bytes_read += done


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _parse(path: Path) -> dict[str, StoredTensor]:
    """What the header of a file says, believed as far as it can be read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:  # not to be asked for
            raise ValueError(f"its header has {size} bytes, it says")
        header: dict[str, Any] = json.loads(file.read(size), object_pairs_hook=_no_duplicates)
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path, about["dtype"], tuple(about["shape"]), 8 + size + about["data_offsets"][0],
            about["data_offsets"][1] - about["data_offsets"][0],
        )
        for name, about in header.items()
    }  # fmt: skip


def _beyond_the_end(path: Path) -> str:
    """Which tensors a truncated file lacks, as far as its header says."""
    try:
        cut = [name for name, t in _parse(path).items() if t.start + t.nbytes > path.stat().st_size]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return ""
    return f"; it ends before {len(cut)} of its tensors do, the first being {min(cut)}" if cut else ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file.

    Raises:
        ValueError: It is not a whole safetensors file, or has a name twice; tensors that it lacks are named.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
        return _parse(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path.name}: not a whole safetensors file ({error}){_beyond_the_end(path)}") from error


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, all of them files of `folder`."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text(), object_pairs_hook=_no_duplicates)
        weight_map: dict[str, str] = index["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX_NAME}: no index of safetensors files ({error!r})") from error
    files = {path.name for path in folder.iterdir() if path.is_file()}
    for name, file in items:
        # Compared with what is there, so that no path leads anywhere else.
        if not isinstance(file, str) or file not in files:
            raise ValueError(f"{INDEX_NAME}: {name} is said to be in {file!r}, which is no file of {folder}")
    return weight_map


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name: those of its index, or without one those of all its safetensors files.

    Raises:
        FileNotFoundError: No such folder, or no safetensors in it.
        ValueError: A bad index, a broken file, or a tensor that is stored twice or not where the index says; named.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: {folder} is not a directory")
    weight_map = _read_index(folder) if (folder / INDEX_NAME).is_file() else None
    files = sorted({*weight_map.values()} if weight_map is not None else (p.name for p in folder.glob("*.safetensors")))
    if weight_map is None and not files:
        raise FileNotFoundError(f"folder: no *.safetensors and no {INDEX_NAME} in {folder}")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if name in found:
                raise ValueError(f"{name}: stored twice, in {found[name].file.name} and in {file}")
            found[name] = stored
    for name, file in (weight_map or {}).items():
        if name not in found or found[name].file.name != file:
            raise ValueError(f"{INDEX_NAME}: {name} should be in {file}, which does not hold it")
    unlisted = sorted(set(found) - set(weight_map)) if weight_map is not None else []
    if unlisted:
        raise ValueError(f"{INDEX_NAME}: does not list {unlisted[0]}, which is in {found[unlisted[0]].file.name}")
    return found


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """A safetensors file of tensors that are known by shape beforehand and arrive row by row, in any order.

    Args:
        path: The file, which must not exist yet.
        tensors: What it is going to hold.

    Raises:
        OSError: It exists, or cannot be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Planned]) -> None:
        self.tensors = tensors
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        # The widest types first, as the library orders them: every tensor begins at a multiple of its item's size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            planned = tensors[name]
            end = position + planned.nbytes
            header[name] = {
                "dtype": _NAMES[planned.dtype],
                "shape": list(planned.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}
        self._file = path.open("xb", buffering=0)
        try:
            self._put(memoryview(len(text).to_bytes(8, "little") + text), 0)
            self._file.truncate(8 + len(text) + position)
        except OSError:
            self._file.close()
            raise

    def _put(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):  # a nearly full disk takes a part, and the system less than 2 GiB at a time
            done += os.pwrite(self._file.fileno(), view[done:], position + done)

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Put `rows`, of the planned dtype, at row `first` of a tensor.

        Raises:
            OSError: The disk does not take them.
        """
        planned = self.tensors[name]
        assert rows.dtype == planned.dtype
        if rows.nbytes == 0:
            return
        row_bytes = planned.nbytes // planned.shape[0] if planned.shape else planned.nbytes
        self._put(_bytes_of(rows.detach().cpu().contiguous()), self._starts[name] + first * row_bytes)

    def close(self) -> None:
        """Put everything on the disk."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close without waiting for the disk, after an error."""
        self._file.close()


def shard_names(count: int) -> list[str]:
    """File names of `count` shards, as transformers has them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Write the index of a folder.

    Args:
        folder: Where.
        files: Tensor names by file.
        total_bytes: Of all tensors.
    """
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))
