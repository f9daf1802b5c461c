"""Optimizer state by parameter name instead of by number, for checkpoints that outlive a number of ranks.

torch numbers parameters in the order of the optimizer's groups. In a sharded checkpoint the state of a parameter goes
under its full name, beside the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dsv41.sharding import local_rows
from lightning_modules.listing import first_few

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
    """`optimizer.state_dict()` with full names of `module`'s parameters for their numbers. Tensors are not copied."""
    state = optimizer.state_dict()
    return _relabelled(state, dict(zip(_order(state), parameters_by_name(module, optimizer), strict=True)))


def numbered_state(named: State) -> State:
    """The opposite of `named_state`: what `optimizer.load_state_dict` takes."""
    return _relabelled(named, {name: number for number, name in enumerate(_order(named))})


def require_same_groups(module: nn.Module, optimizer: Optimizer, named: State) -> None:
    """Raise ValueError unless a checkpoint's groups have the members of the optimizer's groups, in their order."""
    here = named_state(module, optimizer)["param_groups"]
    there = named["param_groups"]
    for own, stored in zip(here, there, strict=False):
        if own["params"] != stored["params"]:
            different = sorted(set(own["params"]) ^ set(stored["params"])) or ["the order"]
            raise ValueError(
                f"ckpt_path: group {own.get('name')!r} of the optimizer has other parameters in the checkpoint "
                f"({first_few(different)}); were some frozen or freed since?"
            )
    if len(here) != len(there):
        raise ValueError(
            f"ckpt_path: {len(there)} groups of parameters in the checkpoint's optimizer, {len(here)} here"
        )


def sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The rows of `whole` that this rank holds of `parameter`, sharded alike. For tensors of the parameter's shape."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    local, first = local_rows(parameter.detach())
    mine = whole[first : first + len(local)].to(local.device, copy=True)
    return DTensor.from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharded_state(optimizer: Optimizer, numbered: State) -> State:
    """A numbered state of whole tensors with each tensor sharded like its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = _order(numbered)
    if len(numbers) != len(parameters):
        raise ValueError(
            f"ckpt_path: {len(numbers)} parameters in the checkpoint's optimizer, {len(parameters)} here; were some "
            "frozen or freed since?"
        )
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in numbered["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() == parameter.dim() > 0 and value.shape != parameter.shape:
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
