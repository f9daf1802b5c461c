"""The released checkpoint layout (ARCHITECTURE 9): names in, names out.

The released names follow the inference code (`layers.0.attn.wq_a.weight`); ours follow the modules
(`model.layers.0.attn.wq_a.weight`). The only structural difference is the experts: one tensor per expert in the
release, one stacked tensor per matrix here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dsv41.engram_table import EngramTable

INDEX_NAME = "model.safetensors.index.json"
_RENAMES = (
    (re.compile(r"^model\.embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^model\."), ""),
    (re.compile(r"\.(attn|ffn)_hc\."), r".hc_\1_"),
    (re.compile(r"\.attn\.core\."), ".attn."),
)
# Parts of the release that this model may be without: draft layers, and the vision tower with its delimiters.
_OPTIONAL = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")
_EXPERT = re.compile(r"^(.*\.ffn\.experts)\.(w[123])$")


@dataclass(frozen=True)
class Slot:
    """Where a released tensor lives: `name` of our parameter or buffer, and the expert inside it (None: all of it)."""

    name: str
    expert: int | None = None


@dataclass
class LoadAudit:
    """What `load_released` did.

    Attributes:
        loaded: Released names that were read.
        skipped: Released names that this model has no place for on purpose (draft layers, vision tower).
    """

    loaded: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def released_name(name: str) -> str:
    """The released name of one of our state-dict entries that is not a stacked expert matrix."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def released_slots(model: nn.Module) -> dict[str, Slot]:
    """Every released name that `model` has a place for."""
    slots: dict[str, Slot] = {}
    for name, tensor in model.state_dict().items():
        if match := _EXPERT.match(name):
            prefix = released_name(match[1])
            for expert in range(tensor.shape[0]):
                slots[f"{prefix}.{expert}.{match[2]}.weight"] = Slot(name, expert)
        else:
            slots[released_name(name)] = Slot(name)
    return slots


def _require_whole(model: nn.Module) -> None:
    """Refuse tables of which this rank holds a part, before anything is read or written."""
    for name, module in model.named_modules():
        if isinstance(module, EngramTable) and module.world_size > 1:
            raise ValueError(
                f"{name}: its rows are split over {module.world_size} ranks; the released layout is only read and "
                "written by models that hold their tables whole"
            )


def released_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under their released names (views, not copies)."""
    state = model.state_dict()
    return {
        released: state[slot.name] if slot.expert is None else state[slot.name][slot.expert]
        for released, slot in released_slots(model).items()
    }


def _files_of(folder: Path) -> dict[str, Path]:
    """Released tensor name -> file, from the index or from the shards themselves."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: {folder} is not a directory")
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        for name, file in weight_map.items():
            if Path(file).name != file or not (folder / file).is_file():
                raise ValueError(f"{INDEX_NAME}: {name} is said to be in {file!r}, which is no file of {folder}")
        return {name: folder / file for name, file in weight_map.items()}
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"folder: no *.safetensors and no {INDEX_NAME} in {folder}")
    files: dict[str, Path] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                if name in files:
                    raise ValueError(f"{name}: stored twice, in {files[name].name} and in {shard.name}")
                files[name] = shard
    return files


def _tensors(files: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                if files.get(name) == path:
                    yield name, reader.get_tensor(name)


def _check_names_and_shapes(model: nn.Module, files: dict[str, Path], slots: dict[str, Slot]) -> list[str]:
    """Raise before anything is overwritten; returns the names that are skipped on purpose."""
    skipped = sorted(name for name in files if name not in slots and name.startswith(_OPTIONAL))
    missing = sorted(set(slots) - set(files))
    unexpected = sorted(set(files) - set(slots) - set(skipped))
    if missing or unexpected:
        raise ValueError(
            f"checkpoint does not fit the model: {len(missing)} tensors missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )
    own = released_state_dict(model)
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as reader:
            promised = {name for name, file in files.items() if file == path}
            absent = sorted(promised - set(reader.keys()))
            if absent:
                raise ValueError(f"{INDEX_NAME}: {absent[:5]} should be in {path.name}, which does not hold them")
            for name in sorted(promised & set(slots)):
                piece = reader.get_slice(name)
                if tuple(piece.get_shape()) != tuple(own[name].shape):
                    raise ValueError(
                        f"{name}: shape {list(piece.get_shape())} in {path.name}, "
                        f"but the model has {list(own[name].shape)}"
                    )
                if piece.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(f"{name}: quantised format {piece.get_dtype()} in {path.name} is not supported")
    return skipped


@torch.no_grad()
def load_released(model: nn.Module, folder: str | Path) -> LoadAudit:
    """Copy an unquantised released-layout checkpoint into `model`, in place, keeping the model's dtypes.

    Args:
        model: `DeepseekV41ForCausalLM`.
        folder: Directory with safetensors shards, with or without an index.

    Returns:
        What was loaded and what was skipped.

    Raises:
        FileNotFoundError: No such directory, or no safetensors in it.
        ValueError: Missing, unexpected, duplicate, quantised or wrongly shaped tensors; named, and the model is
            unchanged.
    """
    _require_whole(model)
    files = _files_of(Path(folder))
    slots = released_slots(model)
    audit = LoadAudit(skipped=_check_names_and_shapes(model, files, slots))
    destination = released_state_dict(model)
    for name, tensor in _tensors(files):
        if name in destination:
            destination[name].copy_(tensor)
            audit.loaded.append(name)
    return audit


def save_released(model: nn.Module, folder: str | Path) -> Path:
    """Write the model under released names into one safetensors file.

    Args:
        model: `DeepseekV41ForCausalLM`.
        folder: Directory, made if missing.

    Returns:
        The file that was written. It appears complete or not at all.

    Raises:
        ValueError: The Engram tables are split over ranks.
    """
    _require_whole(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target, partial = folder / "model.safetensors", folder / ".model.safetensors.partial"
    save_file({name: tensor.contiguous() for name, tensor in released_state_dict(model).items()}, partial)
    partial.replace(target)
    return target
