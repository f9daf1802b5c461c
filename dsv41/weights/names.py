"""Names and formats of the released checkpoint (ARCHITECTURE 9), and what of it a rank holds.

The released names follow the inference code (`layers.0.attn.wq_a.weight`); ours follow the modules
(`model.layers.0.attn.wq_a.weight`). The only structural difference is the experts: one tensor per expert in the
release, one stacked tensor per matrix here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsv41.engram.table import EngramTable
from dsv41.ranks import local_rows
from dsv41.weights.formats import FP4_ROWS, FP8_BLOCKS, FP8_ROWS, WeightFormat

_RENAMES = (
    (re.compile(r"^model\.embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^model\."), ""),
    (re.compile(r"\.(attn|ffn)_hc\."), r".hc_\1_"),
    (re.compile(r"\.attn\.core\."), ".attn."),
)
_EXPERT = re.compile(r"^(.*\.ffn\.experts)\.(w[123])$")

# Parts of the release that this model may be without: draft layers, and the vision tower with its delimiters.
OPTIONAL = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")

_WEIGHT, _SCALE = ".weight", ".scale"
_QUANTISED = (
    (re.compile(r"\.engram\.embed\.weight$"), FP8_ROWS),
    (re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$"), FP4_ROWS),
    (
        re.compile(
            r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|attn\.indexer\.wq_b|ffn\.shared_experts\.w[123]|engram\.wkv)\.weight$"
        ),
        FP8_BLOCKS,
    ),
)
# What the release keeps in fp32 beside bf16 and the quantised formats.
_FP32 = re.compile(r"\.attn_sink$|\.hc_(attn|ffn)_(fn|base|scale)$|\.gate\.bias(_vl)?$")


@dataclass(frozen=True)
class Slot:
    """Where a stored tensor lives: `name` of our parameter or buffer, and the expert inside it (None: all of it)."""

    name: str
    expert: int | None = None

    def shape_in(self, held: Mapping[str, Held]) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        shape = held[self.name].shape
        return shape if self.expert is None else shape[1:]


@dataclass(frozen=True)
class Held:
    """What this process holds of a parameter or buffer.

    Attributes:
        local: Its rows, a plain tensor that shares the model's memory.
        first: Number of the first of them.
        shape: Of the whole.
        group: Ranks that hold the rest, cut as in `sharding.owned_rows`; None if all of it is here.
    """

    local: Tensor
    first: int
    shape: tuple[int, ...]
    group: dist.ProcessGroup | None


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
                slots[f"{prefix}.{expert}.{match[2]}{_WEIGHT}"] = Slot(name, expert)
        else:
            slots[released_name(name)] = Slot(name)
    return slots


def module_slots(model: nn.Module) -> dict[str, Slot]:
    """The names of the modules themselves, under which transformers saves."""
    return {name: Slot(name) for name in model.state_dict()}


def held_tensors(model: nn.Module) -> dict[str, Held]:
    """Every entry of the state dict by name, with what this rank has of it.

    Raises:
        NotImplementedError: A parameter is cut in another way than by rows over one mesh dimension.
    """
    tables = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, EngramTable)}
    found = {}
    for name, tensor in model.state_dict().items():
        table = tables.get(name)
        if isinstance(tensor, DTensor):
            local, first = local_rows(tensor.detach())
            found[name] = Held(local, first, tuple(tensor.shape), _if_shared(tensor.device_mesh.get_group()))
        elif table is not None and table.process_group is not None:
            shape = (table.rows, tensor.shape[1])
            found[name] = Held(tensor.detach(), table.owned.start, shape, _if_shared(table.process_group))
        else:
            found[name] = Held(tensor.detach(), 0, tuple(tensor.shape), None)
    return found


def _if_shared(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    return group if dist.get_world_size(group) > 1 else None


def require_memory(held: dict[str, Held]) -> None:
    """Raise ValueError if a part of the model is on the meta device."""
    for name, part in held.items():
        if part.local.is_meta:
            raise ValueError(
                f"model: {name} is on the meta device and has no values; give it memory with to_empty first"
            )


def owners(held: dict[str, Held]) -> dist.ProcessGroup | None:
    """The ranks that share a model, None for one that is whole.

    Raises:
        ValueError: Parts of it are shared by different ranks.
    """
    groups = [part.group for part in held.values() if part.group is not None]
    ranks = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    if len(ranks) > 1:
        raise ValueError(f"model: its parts are shared by different groups of ranks, {sorted(ranks)}")
    # The first by name: of several groups of the same ranks, all ranks have to take the same.
    return groups[0] if groups else None


def format_of(released: str) -> WeightFormat | None:
    """The quantised format that the release has for a tensor, None for what it does not quantise."""
    return next((fmt for pattern, fmt in _QUANTISED if pattern.search(released)), None)


def scale_name(released: str) -> str:
    """Name of the scales beside a quantised weight."""
    return released.removesuffix(_WEIGHT) + _SCALE


def stays_fp32(released: str) -> bool:
    """Whether the release stores a tensor in fp32, whatever the others are in."""
    return bool(_FP32.search(released))


def stored_dtype(released: str, own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor that is not quantised is written in: its own dtype, or `dtype` unless it stays fp32."""
    if dtype is None:
        return own
    return torch.float32 if stays_fp32(released) and dtype != torch.float64 else dtype
