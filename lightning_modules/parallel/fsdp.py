"""Sharding of a model over ranks, in a fixed order; independent of Lightning.

1. Owners: every Engram table becomes a DTensor over the mesh; each rank keeps its rows (`EngramTable.shard`).
2. Activation checkpointing: blocks are recomputed in backward.
3. ``fully_shard``, bottom-up, with the tables as `ignored_params` in every call:

       model                      fp32   (the head)
         decoder                  bf16   (embedding, final norm)
           block, one per layer   bf16   (norms, projections, experts, Engram projection)
             attn_hc, ffn_hc      fp32   mixing coefficients
             attn.core            fp32   sinks
             attn.compressor      fp32   pooling, where it has gates, with its norm

   The small fp32 units keep their gathered parameters until backward. With ``mixed_precision: none`` every unit has the
   parameters' own dtype. Inputs and outputs of units are never cast, so the carried mixing coefficients stay fp32.
4. Materialisation of what is on the meta device, and initial values by name: no rank ever draws or holds more of a
   table than its rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dsv41.attention import DeepseekV41Attention
from dsv41.config.fields import Flag
from dsv41.engram.table import EngramTable
from dsv41.hyper_connections import HyperConnection
from dsv41.model import DeepseekV41Block, DeepseekV41ForCausalLM
from lightning_modules.text import first_few

MixedPrecision = Literal["bf16", "none"]


# Options of modules already sharded: sharding cannot be repeated or changed.
_SHARDED: WeakKeyDictionary[nn.Module, ParallelOptions] = WeakKeyDictionary()


@dataclass(frozen=True)
class ParallelOptions:
    """Options of sharding.

    Args:
        mixed_precision: "bf16" gathers parameters and computes in bf16, with gradients reduced in fp32; what has to
            stay fp32 does (see the top of this file), and so do stored parameters, tables and optimizer state. "none"
            computes in the parameters' dtype.
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again in backward.
        activation_checkpointing: Keep only the inputs of blocks and recompute the rest in backward.
        cpu_offload: Keep sharded parameters, their gradients and optimizer state in host memory, and step there. Tables
            stay on the device.

    Raises:
        ValueError: `mixed_precision` is neither, or a switch is neither true nor false.
    """

    mixed_precision: MixedPrecision = "none"
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.mixed_precision not in get_args(MixedPrecision):
            raise ValueError(
                f"mixed_precision: must be one of {get_args(MixedPrecision)}, got {self.mixed_precision!r}"
            )
        for field in ("reshard_after_forward", "activation_checkpointing", "cpu_offload"):
            Flag().check(field, getattr(self, field))


def parallelize(parent: nn.Module, mesh: DeviceMesh, options: ParallelOptions, device: torch.device) -> None:
    """Shard every child of `parent` that has parameters, and materialise it; children already sharded are left alone.

    The children, not the parent: a LightningModule's own ``forward`` is never called, so hooks on it would never run.

    Args:
        parent: Holds the model and whatever else is trained.
        mesh: One-dimensional; all ranks.
        options: See `ParallelOptions`.
        device: Where parameters on the meta device go.

    Raises:
        ValueError: A trainable parameter is in no sharded child, a table's owners are other ranks than the mesh's, or a
            module on the meta device does not know its initial values.
    """
    # Outputs of units are views here and there; nothing in the model writes into one, which is what torch warns about.
    warnings.filterwarnings("ignore", ".*returned a view tensor", UserWarning)
    reshard(parent)
    children = {name: child for name, child in parent.named_children() if _has_parameters(child)}
    for name, child in children.items():
        if (earlier := _SHARDED.get(child, options)) != options:
            raise ValueError(f"{name}: has been sharded with {earlier}, which cannot be changed to {options}")
        _require_drawable(name, child)
    # Refused before anything is changed, so that the caller can correct it and retry.
    _refuse(name for name, parameter in parent.named_parameters(recurse=False) if parameter.requires_grad)
    fresh = [child for child in children.values() if child not in _SHARDED]
    for child in fresh:
        if isinstance(child, DeepseekV41ForCausalLM):
            _shard_model(child, mesh, options)
        else:
            fully_shard(child, mesh=mesh, offload_policy=_offload(options, mesh))
    require_sharded(parent, mesh)
    for child in fresh:
        materialise(child, device, torch.device("cpu") if options.cpu_offload else device)
        _SHARDED[child] = options


def reshard(parent: nn.Module) -> None:
    """Put every parameter back into its sharded form: after a forward without a backward, some are still gathered."""
    for module in parent.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _require_drawable(name: str, child: nn.Module) -> None:
    if not isinstance(child, DeepseekV41ForCausalLM) and any(_on_meta(part) for part in child.modules()):
        raise ValueError(
            f"{name}: is on the meta device, where only DeepseekV41ForCausalLM knows its initial values; build it "
            "under torch.device('cpu')"
        )


def _offload(options: ParallelOptions, mesh: DeviceMesh) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()


def _shard_model(model: DeepseekV41ForCausalLM, mesh: DeviceMesh, options: ParallelOptions) -> None:
    common: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": model.prepare_model_owned_dtensors(mesh),
        "offload_policy": _offload(options, mesh),
    }
    decoder = model.model
    if options.activation_checkpointing:
        decoder.backend = replace(decoder.backend, gradient_checkpointing=True)
    own = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = own
    if options.mixed_precision == "bf16":
        half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = options.reshard_after_forward
    for block in decoder.layers:
        for part in fp32_parts(block):
            fully_shard(part, mp_policy=own, reshard_after_forward=False, **common)
        fully_shard(block, mp_policy=half, reshard_after_forward=reshard, **common)
    fully_shard(decoder, mp_policy=half, reshard_after_forward=reshard, **common)
    # Backward begins with the head, so freeing it in between would gather it twice in a row.
    fully_shard(model, mp_policy=own, reshard_after_forward=False, **common)


def fp32_parts(block: nn.Module) -> Iterable[nn.Module]:
    """Modules of a block that compute with fp32 parameters in every precision."""
    assert isinstance(block, DeepseekV41Block)
    for module in block.modules():
        if isinstance(module, HyperConnection):
            yield module
        elif isinstance(module, DeepseekV41Attention):
            yield module.core
            if module.compressor is not None and module.compressor.wgate is not None:
                yield module.compressor


def require_sharded(parent: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError unless every trainable parameter is a DTensor on `mesh`: no other gradient is ever reduced."""
    _refuse(
        name
        for name, parameter in parent.named_parameters()
        if parameter.requires_grad and not (isinstance(parameter, DTensor) and parameter.device_mesh == mesh)
    )


def _refuse(names: Iterable[str]) -> None:
    if wrong := list(names):
        raise ValueError(
            "trainable parameters that are sharded by nobody, so that ranks would drift apart: "
            f"{first_few(wrong)}; put them into a child module of the LightningModule before setup, or freeze them"
        )


def _on_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in chain(module.parameters(recurse=False), module.buffers(recurse=False)))


def materialise(model: nn.Module, device: torch.device, sharded: torch.device) -> None:
    """Give memory to what is on the meta device, and its initial values; everything else keeps its values.

    Args:
        model: Sharded.
        device: Where tables go, and buffers in the end.
        sharded: Where sharded parameters go: the host with `cpu_offload`.
    """
    missing = [module for module in model.modules() if _on_meta(module)]
    for module in missing:
        # Not on the root: that would also wipe what has its values already.
        module.to_empty(device=device if isinstance(module, EngramTable) else sharded, recurse=False)
    if missing:
        assert isinstance(model, DeepseekV41ForCausalLM)  # others were refused
        model.initialize_weights(dtype=None)
