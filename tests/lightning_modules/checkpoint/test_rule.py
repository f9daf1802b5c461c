"""What a checkpoint decides and what the command line decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from dsv41 import DeepseekV41Config
from lightning_modules.checkpoint.rule import (
    HARMLESS_FIELDS,
    KEY,
    CheckpointMismatchError,
    apply_schedules,
    architecture,
    differences,
    follow_command_line,
    require_same_function,
)
from lightning_modules.optim.groups import OptimizerConfig, group_settings


def test_equal_functions_pass_and_harmless_fields_may_differ(tiny_config: Callable[..., DeepseekV41Config]) -> None:
    here = architecture(tiny_config().text_config, "map")
    stored = copy.deepcopy(here)
    for name in HARMLESS_FIELDS & set(stored["text_config"]):
        stored["text_config"][name] = "something else"
    require_same_function({KEY: stored}, here)


def test_every_other_field_is_refused_with_both_values(tiny_config: Callable[..., DeepseekV41Config]) -> None:
    here = architecture(tiny_config().text_config, "map")
    for name in set(here["text_config"]) - HARMLESS_FIELDS:
        stored = copy.deepcopy(here)
        stored["text_config"][name] = "there"
        with pytest.raises(CheckpointMismatchError, match=rf"{name}: checkpoint 'there', command line ") as caught:
            require_same_function({KEY: stored}, here)
        assert repr(here["text_config"][name]) in str(caught.value)


def test_another_tokenizer_of_equal_size_is_refused(tiny_config: Callable[..., DeepseekV41Config]) -> None:
    config = tiny_config().text_config
    with pytest.raises(CheckpointMismatchError, match=r"hashes another tokenizer .*one there, two here"):
        require_same_function({KEY: architecture(config, "one")}, architecture(config, "two"))


@pytest.mark.parametrize("stranger", [{}, {KEY: 3}, {KEY: {}}, {"state_dict": {}}])
def test_a_strangers_checkpoint_is_refused(
    stranger: dict[str, Any], tiny_config: Callable[..., DeepseekV41Config]
) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"not a checkpoint of a DeepSeek-V4\.1 task"):
        require_same_function(stranger, architecture(tiny_config().text_config, None))


def test_differences_give_paths_and_both_values() -> None:
    stored = {"a": {"b": 1, "c": 2}, "d": [1]}
    here = {"a": {"b": 1, "c": 3}, "d": [1], "e": None, "f": 4}
    assert differences(stored, here) == ["a.c: 2 -> 3", "f: None -> 4"]


def test_the_rate_after_a_resume_is_the_new_schedules() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        schedule.step()
    stored = schedule.state_dict()
    other = LambdaLR(optimizer, lambda step: 1 / (2 + step))
    other.load_state_dict(stored)
    apply_schedules([other])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 5)
    assert other.get_last_lr() == [pytest.approx(1 / 5)]


def test_optimizer_settings_follow_the_command_line_and_state_stays() -> None:
    old = group_settings(OptimizerConfig(lr=0.4, weight_decay=0.1))
    new = OptimizerConfig(0.1, 0.7, 0.8, 0.99, 1e-6, table_lr_multiplier=3.0, muon_momentum=0.5)
    groups = [{"name": name, "rule": "kept", "lr": 0.2, "params": [], **old[name]} for name in old]
    rates = [settings["initial_lr"] for settings in old.values()]
    checkpoint = {
        "optimizer_states": [{"param_groups": groups, "state": {0: "kept"}}],
        "lr_schedulers": [{"base_lrs": rates, "_last_lr": [0.2], "last_epoch": 9}],
    }
    follow_command_line(checkpoint, group_settings(new))
    adam = {"betas": (0.8, 0.99), "eps": 1e-6}
    expected = {
        "decay": adam | {"initial_lr": 0.1, "weight_decay": 0.7},
        "muon": {"initial_lr": 0.1, "momentum": 0.5, "weight_decay": 0.7},
        "no_decay": adam | {"initial_lr": 0.1, "weight_decay": 0.0},
        "tables": adam | {"initial_lr": pytest.approx(0.3), "weight_decay": 0.0},
    }
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        assert group == expected[group["name"]] | {"name": group["name"], "rule": "kept", "lr": 0.2, "params": []}
    assert checkpoint["lr_schedulers"] == [
        {"base_lrs": pytest.approx([0.1, 0.1, 0.1, 0.3]), "_last_lr": [0.2], "last_epoch": 9}
    ]
    assert checkpoint["optimizer_states"][0]["state"] == {0: "kept"}
