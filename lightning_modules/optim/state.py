"""Optimizer state by parameter name instead of by number, for checkpoints that outlive a number of ranks.

torch numbers parameters in the order of the optimizer's groups. In a sharded checkpoint the state of a parameter goes
under its full name, beside the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsv41.ranks import local_rows
from lightning_modules.text import first_few

State = dict[str, Any]


def _order(state: State) -> list[Any]:
    return [key for group in state["param_groups"] for key in group["params"]]


def _relabelled(state: State, labels: dict[Any, Any]) -> State:
    groups = [group | {"params": [labels[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {labels[key]: value for key, value in state["state"].items()}, "param_groups": groups}


def parameters_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters in the order of its groups, by their full names in `module`."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def named_state(module: nn.Module, optimizer: Optimizer) -> State:
    """State of the optimizer with full names of `module`'s parameters for their numbers. Tensors are not copied."""
    state = optimizer.state_dict()
    return _relabelled(state, dict(zip(_order(state), parameters_by_name(module, optimizer), strict=True)))


def numbered_state(named: State) -> State:
    """Inverse of `named_state`: argument of `optimizer.load_state_dict`."""
    return _relabelled(named, {name: number for number, name in enumerate(_order(named))})


def require_same_rules(optimizer: Optimizer, state: State) -> None:
    """Raise ValueError unless a checkpoint's groups are as many as the optimizer's, and learn by the same rules."""
    here, there = optimizer.param_groups, state["param_groups"]
    if len(here) != len(there):
        raise ValueError(
            f"ckpt_path: {len(there)} groups of parameters in the checkpoint's optimizer, {len(here)} here"
        )
    for own, stored in zip(here, there, strict=True):
        if own.get("rule") != stored.get("rule"):
            raise ValueError(
                f"ckpt_path: group {own.get('name')!r} of the optimizer learns by {stored.get('rule')!r} in the "
                f"checkpoint, by {own.get('rule')!r} here, and the state of one is of no use to the other; set "
                "optimizer.tables and optimizer.matrices as they were"
            )


def require_same_sizes(optimizer: Optimizer, state: State) -> None:
    """Raise ValueError unless the rules are the same, and each group has as many parameters."""
    require_same_rules(optimizer, state)
    for own, stored in zip(optimizer.param_groups, state["param_groups"], strict=True):
        if len(own["params"]) != len(stored["params"]):
            raise ValueError(
                f"ckpt_path: group {own.get('name')!r} of the optimizer has {len(stored['params'])} parameters in the "
                f"checkpoint, {len(own['params'])} here; were some frozen or freed since, or optimizer.matrices "
                "changed?"
            )


def require_same_groups(module: nn.Module, optimizer: Optimizer, named: State) -> None:
    """Raise ValueError unless the rules are the same, and each group has the same members in the same order."""
    require_same_rules(optimizer, named)
    for own, stored in zip(named_state(module, optimizer)["param_groups"], named["param_groups"], strict=True):
        if own["params"] != stored["params"]:
            different = sorted(set(own["params"]) ^ set(stored["params"])) or ["the order"]
            raise ValueError(
                f"ckpt_path: group {own.get('name')!r} of the optimizer has other parameters in the checkpoint "
                f"({first_few(different)}); were some frozen or freed since, or optimizer.matrices changed?"
            )


def has_rows_of(shape: torch.Size, parameter: Tensor) -> bool:
    """Whether state of this shape follows the rows of a parameter: equally large, or one number per row."""
    if len(shape) != parameter.dim() or len(shape) == 0 or shape[0] != parameter.shape[0]:
        return False
    return shape == parameter.shape or all(size == 1 for size in shape[1:])


def sharded_rows(local: Tensor, parameter: Tensor) -> Tensor:
    """DTensor [N, ...], sharded like the parameter, from this rank's rows `local` [n, ...].

    Beside a plain parameter it is `local` itself.
    """
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    # Given, since from uneven shards each rank would infer another shape.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The rows of `whole` that this rank holds of `parameter`, sharded alike; `whole` if it has other rows."""
    if not isinstance(parameter, DTensor) or not has_rows_of(whole.shape, parameter):
        return whole
    local, first = local_rows(parameter.detach())
    return sharded_rows(whole[first : first + len(local)].to(local.device, copy=True), parameter)


def sharded_state(optimizer: Optimizer, numbered: State) -> State:
    """A numbered state of whole tensors with each tensor sharded like its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = _order(numbered)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"ckpt_path: {len(numbers)} parameters in the checkpoint's optimizer, {len(parameters)} here; were some "
            "frozen or freed since?"
        )
    require_same_sizes(optimizer, numbered)
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in numbered["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or value.dim() != parameter.dim() or value.dim() == 0:
                continue
            if not has_rows_of(value.shape, parameter):
                raise ValueError(
                    f"ckpt_path: {key} of the optimizer's parameter {number} is {list(value.shape)} in the checkpoint, "
                    f"the parameter {list(parameter.shape)} here; were some frozen or freed since?"
                )
    state = {
        number: {
            key: sharded_like(parameter, value) if isinstance(value, Tensor) else value
            for key, value in numbered["state"][number].items()
        }
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in numbered["state"]
    }
    return numbered | {"state": state}
