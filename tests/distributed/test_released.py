"""The released layout into and out of models on 2 and 3 ranks against one process (checks in `released_checks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("released_checks.py")


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def results(request: pytest.FixtureRequest, run_checks: Callable[[Path, int], dict[str, list[float]]]) -> Any:
    """Deviations per check and rank; one launch for all checks."""
    return run_checks(SCRIPT, request.param)


@pytest.mark.parametrize(
    "check",
    [
        "check_loading",
        "check_loading_quantised",
        "check_loading_tables_owned_by_a_group",
        "check_reading_its_share",
        "check_saving",
        "check_saving_for_transformers",
        "check_one_rank_cannot_read",
        "check_damage",
        "check_one_rank_cannot_write",
        "check_a_value_that_cannot_be_stored",
        "check_nothing_is_overwritten",
    ],
)
def test_many_ranks_do_what_one_process_does(results: dict[str, list[float]], check: str) -> None:
    """Bit for bit."""
    assert max(results[check]) == 0, results[check]
