"""Which part of the model the time of a step belongs to, by torch's profiler; used by `train_step.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.profiler import record_function

BACKWARD = "(backward)"  # the label of the range around a backward pass

# Which part a module's own operations belong to, by class name; the innermost module that is named here counts.
PARTS = {
    "DeepseekV41ForCausalLM": "head and loss",
    "DeepseekV41Model": "embedding, final norm",
    "DeepseekV41Block": "mHC",  # what a block does itself is reading from and writing to the streams
    "DeepseekV41NgramHash": "Engram",
    "DeepseekV41Engram": "Engram",
    "DeepseekV41Attention": "attention projections",
    "AttentionCore": "attention core",
    "Indexer": "indexer",
    "Compressor": "compressor",
    "HyperConnection": "mHC",
    "DeepseekV41MoE": "experts",
    "Router": "router",
    "RMSNorm": "norms of blocks",
}


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module is named for, or None if it belongs to the module around it."""
    classes = [cls.__name__ for cls in type(module).__mro__]
    part = next((PARTS[cls] for cls in classes if cls in PARTS), None)
    if part == "norms of blocks" and name.rpartition(".")[2] not in ("attn_norm", "ffn_norm"):
        return None
    return part


@contextlib.contextmanager
def labelled(model: nn.Module) -> Iterator[None]:
    """Every part's forward inside a profiler range of its name."""
    handles, open_ranges = [], []

    def enter(part: str, *_: Any) -> None:
        open_ranges.append(record_function(f"part::{part}"))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if part := part_of(name, module):
            handles.append(module.register_forward_pre_hook(partial(enter, part)))
            handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def times_of_parts(recorded: list[Any]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Milliseconds of each part forward and backward, and of each operation by itself, by the profiler's clock.

    An operation of the forward pass belongs to the innermost labelled module around it. A node of the backward pass
    belongs to the part whose forward operation carries its sequence number.
    """
    events = sorted((e for e in recorded if not e.is_async), key=lambda e: e.time_range.start)
    around = [list(ancestors(event)) for event in events]
    parts = [next((e.name[6:] for e in chain if e.name.startswith("part::")), "other") for chain in around]
    part_of_node = {}
    for event, part in zip(events, parts, strict=True):
        if event.sequence_nr >= 0 and part != BACKWARD:
            part_of_node[event.sequence_nr] = part  # the last one is the one that made the node
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event, chain, part in zip(events, around, parts, strict=True):
        direction = forward
        if part == BACKWARD:
            direction = backward
            node = next((e for e in chain if e.name.startswith("autograd::engine::evaluate_function")), None)
            part = "other" if node is None else part_of_node.get(node.sequence_nr, "other")
        own = event.self_cpu_time_total / 1e3
        direction[part] = direction.get(part, 0.0) + own
        kernels[event.name] = kernels.get(event.name, 0.0) + own
    return forward, backward, kernels


def ancestors(event: Any) -> Iterator[Any]:
    """The event and what it ran inside of, innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent
