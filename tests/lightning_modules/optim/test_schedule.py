"""The learning-rate curves against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_modules.optim.schedule import ScheduleConfig, build_schedule, learning_rate_factor


def curve(config: ScheduleConfig, total: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=3.0)
    schedule = build_schedule(optimizer, config, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"] / 3.0)
        optimizer.step()
        schedule.step()
    return rates


def test_cosine_warms_up_linearly_and_ends_at_the_floor() -> None:
    rates = curve(ScheduleConfig("cosine", warmup_steps=4, floor=0.1), 21)
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 16)) / 2 for k in range(17)]
    assert rates[4:] == pytest.approx(expected)


def test_wsd_is_flat_then_linear() -> None:
    rates = curve(ScheduleConfig("wsd", warmup_steps=2, floor=0.0, decay_share=0.25), 21)
    assert rates[2:14] == pytest.approx([1.0] * 12)
    assert rates[-1] == pytest.approx(0.0)
    # 20 steps after the first, the last 5.25 of them falling
    assert rates[16:] == pytest.approx([1 - (k - 14.75) / 5.25 for k in range(16, 21)])


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 9])
@pytest.mark.parametrize("decay_share", [0.0, 0.5, 1.0])
def test_every_length_has_a_rate_at_every_step(name: Any, warmup: int, decay_share: float) -> None:
    """Runs that end in or right after the warm-up, and the question that is asked after the last step."""
    config = ScheduleConfig(name, warmup_steps=warmup, floor=0.2, decay_share=decay_share)
    for total in range(1, 12):
        rates = [learning_rate_factor(step, total, config) for step in range(total + 2)]
        assert all(0 < rate <= 1 for rate in rates), (total, rates)
        if name == "cosine" and total > warmup + 1:
            assert rates[total - 1] == pytest.approx(0.2)


def test_constant_needs_no_length() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, ScheduleConfig("constant", warmup_steps=1), math.inf)
    assert schedule.get_last_lr() == [0.5]
    assert learning_rate_factor(10**9, math.inf, ScheduleConfig("constant")) == 1.0


def test_a_shape_that_needs_a_length_says_so() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=r"schedule.total_steps: 'cosine' needs"):
        build_schedule(optimizer, ScheduleConfig("cosine"), math.inf)


def test_a_fixed_length_beats_the_trainers() -> None:
    config = ScheduleConfig("cosine", warmup_steps=0, floor=0.0, total_steps=11)
    assert curve(config, 21)[10:] == pytest.approx([0.0] * 11)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ScheduleConfig(name="linear"), "schedule.name"),  # type: ignore[arg-type]
        (lambda: ScheduleConfig(warmup_steps=-1), "schedule.warmup_steps"),
        (lambda: ScheduleConfig(floor=1.5), "schedule.floor"),
        (lambda: ScheduleConfig(decay_share=-0.1), "schedule.decay_share"),
        (lambda: ScheduleConfig(total_steps=0), "schedule.total_steps"),
    ],
)
def test_bad_settings_name_the_field(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        make()
