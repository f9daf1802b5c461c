"""Safe loading of checkpoint files, which may be damaged or hostile.

Nothing that a file says is called, and no message advises to allow it: a checkpoint of this project holds tensors and
plain values. torch checks none of the checksums that it writes, and torch.distributed.checkpoint reads its metadata
with an unrestricted pickle; both are made up for here.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dsv41.files import DamagedFileError, complete_beside
from lightning_modules.text import first_few

METADATA = ".metadata"
_GLOBAL = re.compile(r"(?:GLOBAL|reduce for unrecognized function|new object for .* but got) (?:<\w+ ')?([\w.]+)")


def choices_named(path: Path, error: DamagedFileError) -> DamagedFileError:
    """Error with the checkpoints that could replace `path`: none is chosen without the user."""
    others = complete_beside(path)
    rest = f"complete beside it: {first_few(others)}" if others else "no other checkpoint is beside it"
    return DamagedFileError(f"ckpt_path: {error}; {rest}")


def require_sound(path: Path) -> None:
    """Read a file of `torch.save` once and compare every record with its CRC-32.

    Raises:
        FileNotFoundError: There is none.
        DamagedFileError: It is cut, no such file at all, or a record is not the one that was written; the message names
            file and record, and what could be loaded instead.
    """
    with path.open("rb") as file:
        try:
            if file.read(4) != b"PK\x03\x04":
                raise zipfile.BadZipFile("it does not begin like one")
            with zipfile.ZipFile(file) as archive:
                record = archive.testzip()
            damage = record and f"the CRC-32 of its record {record} differs; the disk or a copy has damaged it"
        except Exception as error:  # one wrong bit can make zipfile raise almost anything, even an OSError
            damage = f"damaged, cut or no checkpoint at all: {error}"
    if damage:
        raise choices_named(path, DamagedFileError(f"{path}: its content is not what was written ({damage})"))


def read_plain(path: Path, mmap: bool = False, map_location: Any = "cpu") -> dict[str, Any]:
    """Open a file of `torch.save` that holds a dictionary of tensors and plain values.

    Args:
        path: The file.
        mmap: Read tensors from the disk when they are looked at.
        map_location: As in `torch.load`.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read, or holds anything else; the message names it.
    """
    try:
        loaded = torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # Not chained: torch's text says how to have it executed.
        raise ValueError(f"ckpt_path: {path} {refusal(error)}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"ckpt_path: {path} holds no dictionary but a {type(loaded).__name__}")
    return loaded


def refusal(error: Exception) -> str:
    """Reason why `torch.load(weights_only=True)` has refused a file, without its advice."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"asks for {found[1]}, which is refused: a checkpoint holds tensors and plain values, and no code is run"
    if isinstance(error, pickle.UnpicklingError):
        return "holds something else than tensors and plain values, which is refused; no code is run"
    return f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


# All that metadata of tensors consists of, beside torch.Size and dtypes. No BytesStorageMetadata: what it describes
# would be read by an unrestricted pickle, and this project stores nothing that way.
_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of metadata into inert records: a pickle can also set attributes of the classes that it is given."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)

        class Record:
            def __init__(self, *_values: Any) -> None: ...

            def __setstate__(self, state: Any) -> None:
                self.state = state

        self._record = Record

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self._record
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused; no code is run")


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise TypeError(f"a size is a {type(value).__name__}")
    return value


def _rebuilt(metadata: Any, files: Collection[str]) -> Metadata:
    """Metadata rebuilt from records, value by value."""
    fields = metadata.state
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in fields["state_dict_metadata"].items():
        dtype, _, requires_grad, _, pinned = entry.state["properties"].state
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the type of {name} is a {type(dtype).__name__}")
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype, requires_grad=bool(requires_grad), pin_memory=bool(pinned)),
            _size(entry.state["size"]),
            [
                ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
                for chunk in entry.state["chunks"]
            ],
        )
    paths = {name: tuple(fields["planner_data"][name]) for name in tensors}
    for name, path in paths.items():
        if name != ".".join(map(str, path)):
            raise ValueError(f"{name} is said to be {path}")
    places = {}
    for key, info in ((key.state, info.state) for key, info in fields["storage_data"].items()):
        if info["relative_path"] not in files:
            raise ValueError(f"it refers to {info['relative_path']!r}, which is none of the checkpoint's files")
        if info.get("transform_descriptors"):
            raise ValueError(f"{key['fqn']} is stored transformed")
        offset = key.get("offset")
        index = MetadataIndex(key["fqn"], None if offset is None else _size(offset), key.get("index"))
        places[index] = _StorageInfo(info["relative_path"], int(info["offset"]), int(info["length"]))
    return Metadata(tensors, planner_data=paths, storage_data=places, version=fields.get("version"))


def read_metadata(path: Path, files: Collection[str]) -> Metadata:
    """Metadata of torch.distributed.checkpoint, of tensors only.

    Args:
        path: The file.
        files: Names that it may refer to: the files of its folder.

    Raises:
        ValueError: It cannot be read, holds anything else or refers to another file; the message names it.
    """
    with path.open("rb") as file:
        try:
            return _rebuilt(_MetadataUnpickler(file).load(), files)
        except Exception as error:  # a pickle that is none can raise anything
            raise ValueError(f"ckpt_path: {path} is no metadata of tensors: {error}") from error
