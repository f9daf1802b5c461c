"""Optimizer state goes from numbers to names and back, and is refused where it belongs to other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_modules.optim.state import (
    has_rows_of,
    named_state,
    numbered_state,
    parameters_by_name,
    require_same_groups,
    sharded_like,
    sharded_state,
)

NAMES = ["first.weight", "idle.weight", "idle.bias", "first.bias"]


class Net(nn.Module):
    """`idle` takes no part in the loss, like an expert that no token has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.idle = nn.Linear(2, 2)


def two_groups(module: Net) -> AdamW:
    """The order of the groups is not that of the module, so that a number is no position in the module."""
    groups = [
        {"name": "decay", "params": [module.first.weight, module.idle.weight], "weight_decay": 0.1},
        {"name": "no_decay", "params": [module.idle.bias, module.first.bias], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.01)


def step(module: Net, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    module.first(torch.tensor([[1.0, 2.0, 3.0]])).square().sum().backward()
    optimizer.step()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def optimizer(net: Net) -> AdamW:
    """After two steps, in which `idle` had no gradient."""
    optimizer = two_groups(net)
    step(net, optimizer)
    step(net, optimizer)
    return optimizer


def require_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for key, entries in left["state"].items():
        torch.testing.assert_close(entries, right["state"][key], rtol=0, atol=0)


def test_a_state_by_name_lists_the_groups_and_only_what_had_a_gradient(net: Net, optimizer: AdamW) -> None:
    named = named_state(net, optimizer)
    assert list(parameters_by_name(net, optimizer)) == NAMES
    assert [group["params"] for group in named["param_groups"]] == [NAMES[:2], NAMES[2:]]
    assert [group["weight_decay"] for group in named["param_groups"]] == [0.1, 0.0]
    assert named["state"].keys() == {"first.weight", "first.bias"}
    for name in ("first.weight", "first.bias"):
        assert named["state"][name]["exp_avg"] is optimizer.state[net.get_parameter(name)]["exp_avg"]


def test_numbers_to_names_and_back_is_the_same_state(net: Net, optimizer: AdamW) -> None:
    state = optimizer.state_dict()
    assert set(state["state"]) == {0, 3}
    require_equal(numbered_state(named_state(net, optimizer)), state)


def test_naming_leaves_the_optimizer_as_it_is(net: Net, optimizer: AdamW) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    numbered_state(named_state(net, optimizer))
    require_equal(optimizer.state_dict(), before)


def test_training_goes_on_alike_from_a_state_that_was_named_and_numbered(net: Net, optimizer: AdamW) -> None:
    other = copy.deepcopy(net)
    restored = two_groups(other)
    restored.load_state_dict(copy.deepcopy(numbered_state(named_state(net, optimizer))))
    step(net, optimizer)
    step(other, restored)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, net.get_parameter(name)), name
    assert restored.state.keys() == {other.first.weight, other.first.bias}


def test_the_same_groups_are_accepted(net: Net, optimizer: AdamW) -> None:
    fresh = Net()
    require_same_groups(fresh, two_groups(fresh), named_state(net, optimizer))


def test_a_parameter_frozen_since_is_named(net: Net, optimizer: AdamW) -> None:
    named = named_state(net, optimizer)
    groups = [
        {"name": "decay", "params": [net.first.weight, net.idle.weight]},
        {"name": "no_decay", "params": [net.first.bias]},
    ]
    with pytest.raises(ValueError, match=r"^ckpt_path: group 'no_decay' .*\(idle\.bias\); were some frozen") as error:
        require_same_groups(net, AdamW(groups), named)
    assert "weight" not in str(error.value)


def test_a_parameter_freed_since_is_named(net: Net, optimizer: AdamW) -> None:
    named = named_state(net, optimizer)
    named["param_groups"][0]["params"].remove("idle.weight")
    with pytest.raises(ValueError, match=r"group 'decay' .*\(idle\.weight\); were some frozen or freed"):
        require_same_groups(net, two_groups(net), named)


def test_another_order_is_refused(net: Net, optimizer: AdamW) -> None:
    """Numbers would then go to other parameters."""
    named = named_state(net, optimizer)
    named["param_groups"][1]["params"].reverse()
    with pytest.raises(ValueError, match=r"group 'no_decay' .*\(the order\)"):
        require_same_groups(net, two_groups(net), named)


def test_another_number_of_groups_is_refused(net: Net, optimizer: AdamW) -> None:
    """In both directions, although the groups that both have agree."""
    named = named_state(net, optimizer)
    one = AdamW([{"name": "decay", "params": [net.first.weight, net.idle.weight]}])
    with pytest.raises(ValueError, match="2 groups of parameters in the checkpoint's optimizer, 1 here"):
        require_same_groups(net, one, named)
    with pytest.raises(ValueError, match="1 groups of parameters in the checkpoint's optimizer, 2 here"):
        require_same_groups(net, optimizer, named_state(net, one))


def test_a_state_for_plain_parameters_keeps_its_values(net: Net, optimizer: AdamW) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][3]["calls"] = 7
    sharded = sharded_state(two_groups(Net()), state)
    require_equal(sharded, state)
    assert sharded["state"].keys() == {0, 3}
    assert sharded["state"][3]["calls"] == 7


def test_a_plain_parameter_takes_a_tensor_as_it_is(net: Net) -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert sharded_like(net.first.weight, whole) is whole


def test_a_state_for_another_number_of_parameters_is_refused(net: Net, optimizer: AdamW) -> None:
    fewer = AdamW([net.first.weight, net.first.bias])
    with pytest.raises(ValueError, match=r"^ckpt_path: 4 parameters in the checkpoint's optimizer, 2 here"):
        sharded_state(fewer, optimizer.state_dict())
    with pytest.raises(ValueError, match=r"^ckpt_path: 2 parameters in the checkpoint's optimizer, 4 here"):
        sharded_state(optimizer, fewer.state_dict())


@pytest.mark.parametrize(
    ("shape", "parameter", "expected"),
    [
        ((5, 3), (5, 3), True),
        ((5, 1), (5, 3), True),
        ((5, 1, 1), (5, 3, 2), True),
        ((5,), (5,), True),
        ((), (5, 3), False),
        ((), (), False),
        ((5,), (5, 3), False),
        ((5, 2), (5, 3), False),
        ((4, 3), (5, 3), False),
        ((5, 3, 1), (5, 3, 2), False),
    ],
)
def test_state_goes_with_rows_if_it_is_as_large_or_has_one_number_per_row(
    shape: tuple[int, ...], parameter: tuple[int, ...], expected: bool
) -> None:
    assert has_rows_of(torch.Size(shape), torch.empty(parameter)) is expected


def test_a_state_of_other_columns_is_refused_and_one_number_per_row_is_not(net: Net, optimizer: AdamW) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["hits"] = torch.ones(2, 1)
    assert torch.equal(sharded_state(two_groups(Net()), state)["state"][0]["hits"], torch.ones(2, 1))
    state["state"][0]["exp_avg"] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"exp_avg of the optimizer's parameter 0 is \[2, 4\] .* parameter \[2, 3\]"):
        sharded_state(two_groups(Net()), state)


def test_another_rule_is_refused_by_name_and_by_number(net: Net, optimizer: AdamW) -> None:
    for group in optimizer.param_groups:
        group["rule"] = "adamw"
    other = two_groups(net)
    for group, rule in zip(other.param_groups, ("adamw", "rows"), strict=True):
        group["rule"] = rule
    message = r"^ckpt_path: group 'no_decay' .* learns by 'adamw' in the checkpoint, by 'rows' here.*optimizer\.tables"
    with pytest.raises(ValueError, match=message):
        require_same_groups(net, other, named_state(net, optimizer))
    with pytest.raises(ValueError, match=message):
        sharded_state(other, optimizer.state_dict())


def test_groups_of_other_sizes_are_refused_by_number(net: Net, optimizer: AdamW) -> None:
    """As many parameters in all, so that numbers would go to others."""
    groups = [
        {"name": "decay", "params": [net.first.weight, net.idle.weight, net.idle.bias]},
        {"name": "no_decay", "params": [net.first.bias]},
    ]
    with pytest.raises(
        ValueError, match=r"group 'decay' .* 2 parameters in the checkpoint, 3 here; .*matrices changed"
    ):
        sharded_state(AdamW(groups), optimizer.state_dict())
