"""Checkpoints of many ranks: a folder with one file per rank, opened on any number of ranks.

    step-00000100.ckpt/
      __0_0.distcp, __1_0.distcp, ...   tensors of the model and the optimizers (torch.distributed.checkpoint)
      .metadata                         where which part of which tensor is
      meta.pt                           everything else: plain values, opened with weights_only=True
      complete.json                     written last: sizes and SHA-256 of the files above (see `dsv41/files.py`)

Every file is compared with its checksum before any tensor is read into a model; folders written before there were
checksums open without. Nothing in a folder is executed (see `safe_load.py`).

The folder has to be on storage that all ranks see. Tensors are named ``state_dict.NAME`` and
``optimizer_I.state.NAME.KEY``, so they are found again whatever the number of ranks. A parameter without optimizer
state (it never had a gradient) is without one after loading.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dsv41.files import (
    DamagedFileError,
    files_in,
    is_complete,
    os_error_behind,
    plain_name,
    require_intact,
    sha256_of,
    unwritten,
)
from dsv41.ranks import local_rows
from lightning_modules.checkpoint.safe_load import METADATA, choices_named, read_metadata, read_plain, refusal
from lightning_modules.checkpoint.schema import require_optimizers
from lightning_modules.optim.state import has_rows_of, numbered_state, sharded_rows
from lightning_modules.text import first_few

META = "meta.pt"


def plain_file(path: Path) -> Path:
    """The file with the plain values of a checkpoint: its own, or of a folder the one in it."""
    return path / META if path.is_dir() else path


class IncompleteCheckpointError(ValueError):
    """Incomplete folder of a killed save, or no sharded checkpoint."""


def _require_complete(folder: Path) -> None:
    if not is_complete(folder):
        raise IncompleteCheckpointError(
            f"ckpt_path: {folder} is not a complete sharded checkpoint (its complete.json is missing or disagrees with "
            "the files); a killed or failed copy or save leaves such folders"
        )


def split_tensors(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a Lightning checkpoint, with optimizer states by name, into tensors and plain values.

    Returns:
        Nested dictionary of tensors; and the checkpoint without ``state_dict``, with optimizer states reduced to what
        is not a tensor.
    """
    meta = dict(checkpoint)
    tensors: dict[str, Any] = {"state_dict": meta.pop("state_dict")}
    plain_optimizers = []
    for index, optimizer in enumerate(meta.pop("optimizer_states", [])):
        kept: dict[str, dict[str, Any]] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, entries in optimizer["state"].items():
            kept[name] = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
            plain[name] = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
        tensors[f"optimizer_{index}"] = {"state": {name: entries for name, entries in kept.items() if entries}}
        plain_optimizers.append(optimizer | {"state": {name: entries for name, entries in plain.items() if entries}})
    if plain_optimizers:
        meta["optimizer_states"] = plain_optimizers
    return tensors, meta


def size_of(tensors: Any) -> int:
    """Bytes of all tensors in nested dictionaries, of sharded ones all parts."""
    if isinstance(tensors, Mapping):
        return sum(size_of(value) for value in tensors.values())
    return tensors.nbytes if isinstance(tensors, Tensor) else 0


class _Writer(dcp.FileSystemWriter):
    """Storage writer that keeps the reason of a failure, which exceptions lose on their way to other ranks."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            cause = os_error_behind(error)
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Write every rank's part. Called by all ranks; if one fails, all raise.

    Raises:
        OSError: A rank could not write; the message says which, why, and how much room there is.
    """
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        codes = [failure[0].errno for failure in error.failures.values() if isinstance(failure[0], OSError)]
        raise unwritten(plain_name(folder), reasons, codes[0] if codes else None, size_of(tensors)) from error


def checksums_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """SHA-256 of files that `write_tensors` has written on a rank, by file name."""
    return {file.name: sha256_of(file) for file in folder.glob(f"__{rank}_*")}


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write everything but the tensors. Called by one rank."""
    with (folder / META).open("wb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())


def require_intact_share(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare this rank's share of a folder's files with their checksums; all ranks together read each file once.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
        DamagedFileError: A file is not what was written; the message names it and what could be loaded instead.
    """
    _require_complete(folder)
    try:
        require_intact(folder, files_in(folder)[rank::ranks])
    except DamagedFileError as error:
        raise choices_named(folder, error) from error


def read_meta(folder: Path) -> dict[str, Any]:
    """Everything but the tensors.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
        ValueError: The file is damaged, or holds more than plain values and tensors.
    """
    _require_complete(folder)
    require_intact(folder, [META])
    return read_plain(folder / META)


def _metadata(folder: Path) -> Metadata:
    _require_complete(folder)
    require_intact(folder, [METADATA])
    return read_metadata(folder / METADATA, files_in(folder))


class _Reader(dcp.FileSystemReader):
    """Storage reader for metadata of tensors only; executes nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._reading = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_data(*args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            # Not chained: torch's text says how to have it executed.
            raise ValueError(f"ckpt_path: {Path(self.path) / self._reading} {refusal(error)}") from None


def _read_tensors(folder: Path, tensors: dict[str, Any], no_dist: bool = False) -> None:
    """Read into the memory of nested tensors, with `no_dist` by this process alone; if a rank fails, all raise."""
    if no_dist:
        _metadata(folder)  # the error of a reader would come wrapped
    try:
        with warnings.catch_warnings():
            if no_dist:
                warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # it is
            dcp.load(tensors, storage_reader=_Reader(folder), no_dist=no_dist)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise ValueError(str(first)) from None


def _stored(folder: Path) -> dict[tuple[Any, ...], TensorStorageMetadata]:
    """Path of every tensor in the folder, for example ("state_dict", NAME), and its sizes."""
    metadata = _metadata(folder)
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data
    return {
        paths[key]: entry
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def require_same_tensors(
    path: Path, stored: dict[str, tuple[int, ...]], state_dict: dict[str, Tensor], strict: bool
) -> None:
    """Raise ValueError unless the shapes in a checkpoint are those of `state_dict`; `strict` also compares names."""
    own = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    problems = [
        f"{name} is {stored[name]} there, {shape} here"
        for name, shape in own.items()
        if stored.get(name, shape) != shape
    ]
    if strict:
        if missing := own.keys() - stored.keys():
            problems.append(f"missing there: {first_few(sorted(missing))}")
        if unexpected := stored.keys() - own.keys():
            problems.append(f"unknown here: {first_few(sorted(unexpected))}")
    if problems:
        raise ValueError(f"ckpt_path: the tensors of {path} are not the model's: " + "; ".join(problems[:6]))


def model_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of the model by name, on the meta device: shapes and dtypes.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
        ValueError: The metadata are damaged or hold anything else than tensors.
    """
    return {
        path[1]: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for path, entry in _stored(folder).items()
        if path[0] == "state_dict"
    }


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `model_tensors`."""
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(folder).items()}


def read_model(folder: Path, targets: dict[str, Tensor], no_dist: bool = False) -> None:
    """Read tensors of the model into the memory of `targets`, whose names and shapes agree.

    Args:
        folder: The checkpoint.
        targets: Some or all of the names in `model_shapes`, with tensors of any dtype and device to fill.
        no_dist: False is called by all ranks, after each has called `require_intact_share`. True is for one process,
            which needs no process group; it compares all files with their checksums first.

    Raises:
        DamagedFileError: With `no_dist`: a file is not what was written; no tensor has been touched.
        ValueError: A file holds anything else than tensors.
    """
    if no_dist:
        require_intact_share(folder)
    _read_tensors(folder, {"state_dict": targets}, no_dist)


def read_optimizer(folder: Path, index: int, parameters: Mapping[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """Read the state of an optimizer. Called by all ranks.

    Args:
        folder: The checkpoint.
        index: Number of the optimizer.
        parameters: Its parameters by name; state of its rows comes back sharded like it.
        plain: The optimizer's entry in ``optimizer_states`` of `read_meta`.

    Returns:
        State by name, for `numbered_state`.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for path, entry in _stored(folder).items():
        if path[:2] != (f"optimizer_{index}", "state"):
            continue
        _, _, name, key = path
        parameter = parameters[name]
        dtype = entry.properties.dtype
        if has_rows_of(entry.size, parameter):
            local, _ = local_rows(parameter.detach())
            rows = torch.zeros(len(local), *entry.size[1:], dtype=dtype, device=local.device)
            target = sharded_rows(rows, parameter)
        else:
            target = torch.zeros(entry.size, dtype=dtype)
        tensors.setdefault(name, {})[key] = target
    if tensors:
        _read_tensors(folder, {f"optimizer_{index}": {"state": tensors}})
    return _rejoined(plain, tensors)


def _rejoined(plain: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """State of an optimizer, joined from the two parts of `split_tensors`."""
    # Not a set, whose order differs between processes: tensors are collected in this order, by all ranks at once.
    names = [*plain["state"], *(name for name in tensors if name not in plain["state"])]
    return plain | {"state": {name: plain["state"].get(name, {}) | tensors.get(name, {}) for name in names}}


def read_whole(folder: Path, optimizers: bool = True) -> dict[str, Any]:
    """Assemble an ordinary Lightning checkpoint in the memory of one process, without a process group.

    Args:
        folder: The checkpoint.
        optimizers: False leaves the optimizers' states out, two thirds of the memory with AdamW.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
        DamagedFileError: A file is not what was written.
        ValueError: A file holds anything else than tensors and plain values.
    """
    require_intact_share(folder)
    checkpoint = read_meta(folder)
    plain_optimizers = checkpoint.pop("optimizer_states", None)
    if plain_optimizers is not None and optimizers:
        require_optimizers(folder / META, plain_optimizers)
    tensors: dict[str, Any] = {}
    for path, entry in _stored(folder).items():
        if not optimizers and path[0] != "state_dict":
            continue
        place = tensors
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read_tensors(folder, tensors, no_dist=True)
    checkpoint["state_dict"] = tensors["state_dict"]
    if plain_optimizers is not None and optimizers:
        stored = [tensors.get(f"optimizer_{index}", {"state": {}})["state"] for index in range(len(plain_optimizers))]
        checkpoint["optimizer_states"] = [
            numbered_state(_rejoined(plain, state)) for plain, state in zip(plain_optimizers, stored, strict=True)
        ]
    return checkpoint
