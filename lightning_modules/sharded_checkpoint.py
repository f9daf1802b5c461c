"""Checkpoints of many ranks: a folder with one file per rank, opened on any number of ranks.

    step-00000100.ckpt/
      __0_0.distcp, __1_0.distcp, ...   tensors of the model and the optimizers (torch.distributed.checkpoint)
      .metadata                         where which part of which tensor is
      meta.pt                           everything else: plain values, opened with weights_only=True
      complete.json                     written last: sizes of the files above (see `files.py`)

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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_modules.files import is_complete
from lightning_modules.listing import first_few
from lightning_modules.optimizer_state import numbered_state

META = "meta.pt"


class IncompleteCheckpointError(ValueError):
    """A folder that a killed save left, or that is no sharded checkpoint."""


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


def write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Write every rank's part. Called by all ranks; if one fails, all raise.

    Raises:
        OSError: A rank could not write; the message says which and why.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise OSError(f"{folder.name} could not be written ({reasons})") from error


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write everything but the tensors. Called by one rank."""
    with (folder / META).open("wb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())


def read_meta(folder: Path) -> dict[str, Any]:
    """Everything but the tensors.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
    """
    _require_complete(folder)
    meta: dict[str, Any] = torch.load(folder / META, map_location="cpu", weights_only=True)
    return meta


def _stored(folder: Path) -> dict[tuple[Any, ...], TensorStorageMetadata]:
    """Path of every tensor in the folder, ("state_dict", NAME) say, and its sizes."""
    metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
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


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors."""
    return {path[1]: tuple(entry.size) for path, entry in _stored(folder).items() if path[0] == "state_dict"}


def read_model(folder: Path, targets: dict[str, Tensor]) -> None:
    """Read tensors of the model into the memory of `targets`, whose names and shapes agree. Called by all ranks."""
    dcp.load({"state_dict": targets}, storage_reader=dcp.FileSystemReader(folder))


def read_optimizer(folder: Path, index: int, parameters: Mapping[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """Read the state of an optimizer. Called by all ranks.

    Args:
        folder: The checkpoint.
        index: Number of the optimizer.
        parameters: Its parameters by name; state of a parameter's shape comes back sharded like it.
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
        if tuple(entry.size) == tuple(parameter.shape):
            target = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            target = torch.zeros(entry.size, dtype=dtype)
        tensors.setdefault(name, {})[key] = target
    if tensors:
        dcp.load({f"optimizer_{index}": {"state": tensors}}, storage_reader=dcp.FileSystemReader(folder))
    return _rejoined(plain, tensors)


def _rejoined(plain: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """An optimizer's state of which `split_tensors` has made two parts."""
    # Not a set, whose order differs between processes: tensors are collected in this order, by all ranks at once.
    names = [*plain["state"], *(name for name in tensors if name not in plain["state"])]
    return plain | {"state": {name: plain["state"].get(name, {}) | tensors.get(name, {}) for name in names}}


def read_whole(folder: Path) -> dict[str, Any]:
    """Assemble an ordinary Lightning checkpoint in the memory of one process, without a process group.

    Raises:
        IncompleteCheckpointError: The folder is not complete.
    """
    checkpoint = read_meta(folder)
    tensors: dict[str, Any] = {}
    for path, entry in _stored(folder).items():
        place = tensors
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # it is
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    checkpoint["state_dict"] = tensors["state_dict"]
    optimizers = []
    for index, plain in enumerate(checkpoint.get("optimizer_states", [])):
        stored = tensors.get(f"optimizer_{index}", {"state": {}})["state"]
        optimizers.append(numbered_state(_rejoined(plain, stored)))
    if optimizers:
        checkpoint["optimizer_states"] = optimizers
    return checkpoint
