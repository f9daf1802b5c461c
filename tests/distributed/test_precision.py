"""Which dtypes a training step stores and computes in, and numbers of a run that ranks must agree on.

What runs on the ranks, and the list of names, is in `precision_checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("precision_checks.py")
NAMES = 166 + 12  # parameters of golden-tiny and router biases

Found = dict[str, list[float]]


@pytest.fixture(scope="module")
def one(run_checks: Callable[[Path, int], Found]) -> Found:
    return run_checks(SCRIPT, 1)


@pytest.fixture(scope="module")
def two(run_checks: Callable[[Path, int], Found]) -> Found:
    return run_checks(SCRIPT, 2)


@pytest.mark.parametrize("precision", ["32_true", "64_true", "bf16_mixed"])
def test_on_a_single_device_what_has_to_stay_wide_does(one: Found, precision: str) -> None:
    assert one[f"check_single_device_{precision}"] == [NAMES]


@pytest.mark.parametrize("ranks", ["one", "two"])
@pytest.mark.parametrize("policy", ["none", "bf16"])
def test_sharded_what_has_to_stay_wide_does(request: Any, ranks: str, policy: str) -> None:
    found = request.getfixturevalue(ranks)[f"check_sharded_{policy}"]
    assert found == [NAMES] * len(found)


def test_update_ratios_do_not_depend_on_the_number_of_ranks(one: Found, two: Found) -> None:
    names = [name for name in one if name.startswith("ratio_")]
    assert one["number_of_ratios"] == [len(names)] == [5]
    for name in names:
        (alone,) = one[name]
        assert alone > 0
        assert two[name] == pytest.approx([alone] * 2, rel=1e-9), name


def test_the_peaks_of_all_ranks_add_up(one: Found, two: Found) -> None:
    """They are 1 and 2 GFLOPs per second."""
    (alone,) = one["utilisation_per_token"]
    assert two["utilisation_per_token"] == pytest.approx([alone / 3] * 2)
