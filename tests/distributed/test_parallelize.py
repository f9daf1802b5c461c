"""Sharded models on 2 and 3 ranks against one process that holds everything (checks in `parallelize_checks.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_modules.parallel.fsdp import ParallelOptions

SCRIPT = Path(__file__).with_name("parallelize_checks.py")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def results(request: pytest.FixtureRequest, run_checks: Callable[[Path, int], dict[str, list[float]]]) -> Any:
    """Deviations per check and rank; one launch for all checks."""
    return run_checks(SCRIPT, request.param)


# 0 is bit-equal. What a factor or a missing term would do lies far above the bounds of float64, which
# `check_a_factor_would_show` asserts; 20 steps of training multiply rounding (see SEED in the checks).
BOUNDS = {
    "check_initial_values": 0.0,
    "check_existing_values": 0.0,
    "check_tables": 0.0,
    "check_gradients": 1e-12,
    "check_gradients_activation_checkpointing": 1e-12,
    "check_gradients_without_resharding": 1e-12,
    "check_gradients_cpu_offload": 1e-12,
    "check_accumulation": 1e-12,
    "check_gradient_norm": 1e-12,
    "check_evaluation": 1e-12,
    "check_training": 1e-9,
    "check_training_clipped_by_value": 1e-9,
    "check_a_factor_would_show": 1e-12,
    "check_float32_loss": 1e-6,
    "check_float32_gradients": 1e-5,
    "check_bf16_loss": 2e-2,
    "check_bf16_loss_of_a_cast_model": 1e-5,
    "check_bf16_gradients": 1e-2,
    "check_refusals": 0.0,
    "check_frozen_parameter_of_the_parent": 0.0,
    "check_second_child": 1e-12,
    "check_again": 0.0,
    "check_again_after_evaluation": 0.0,
    "check_again_after_refusal": 0.0,
}


@pytest.mark.parametrize(("check", "bound"), BOUNDS.items())
def test_a_sharded_model_equals_the_whole_one(results: dict[str, list[float]], check: str, bound: float) -> None:
    assert max(results[check]) <= bound, results[check]


def test_no_check_goes_unasserted(results: dict[str, list[float]]) -> None:
    assert results.keys() == BOUNDS.keys()


@pytest.mark.parametrize("value", ["fp16", "bf16-mixed", None])
def test_unknown_precisions_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^mixed_precision: must be one of .*, got {re.escape(repr(value))}$"):
        ParallelOptions(mixed_precision=value)
