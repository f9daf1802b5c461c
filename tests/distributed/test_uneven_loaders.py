"""A user's own loaders with different numbers of batches are refused on all ranks (`uneven_loader_checks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_modules.parallel.even_loaders import batches_wanted, require_even

SCRIPT = Path(__file__).with_name("uneven_loader_checks.py")


def test_two_ranks_agree_or_are_refused_together(run_checks: Callable[[Path, int], dict[str, list[float]]]) -> None:
    """Each check has asserted what it says, on both ranks; else the launch would have failed."""
    found = run_checks(SCRIPT, 2)
    assert len(found) == 5
    assert all(values == [0.0, 0.0] for values in found.values()), found


@pytest.mark.parametrize(("limit", "wanted"), [(1.0, 7), (0.5, 3), (0, 0), (5, 5), (9, 7), (0.0, 0)], ids=str)
def test_the_limit_counts(limit: float, wanted: int) -> None:
    assert batches_wanted([torch.zeros(1)] * 7, limit) == wanted
    assert batches_wanted(iter([]), limit) is None


def test_counts_are_named_by_rank() -> None:
    require_even("x", ["2", "2", "2"])
    with pytest.raises(ValueError, match=r"^x: .*; rank 0 has 2, rank 1 has 2, rank 2 has 1$"):
        require_even("x", ["2", "2", "1"])
