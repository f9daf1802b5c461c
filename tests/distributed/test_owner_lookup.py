"""Row-owned Engram tables on 2 and 3 ranks against a dense table (checks in `owner_lookup_checks.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41.ranks import owned_rows

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).with_name("owner_lookup_checks.py")


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def results(request: pytest.FixtureRequest, run_checks: Callable[[Path, int], dict[str, list[float]]]) -> Any:
    """Deviations per check and rank; one launch for all checks."""
    return run_checks(SCRIPT, request.param)


@pytest.mark.parametrize(
    ("check", "bound"),
    [
        ("check_initial_rows", 0.0),
        ("check_forward", 0.0),
        ("check_gradient", 1e-14),
        ("check_gradient_with_recomputation", 1e-14),
        ("check_accumulated_gradient", 1e-14),
        ("check_sparse_gradient", 1e-14),
        ("check_sparse_gradient_under_fsdp", 1e-14),
        ("check_frozen", 0.0),
        ("check_bad_id", 0.0),
        ("check_dtensor", 1e-14),
        ("check_model", 1e-12),
    ],
)
def test_sharded_table_equals_the_dense_one(results: dict[str, list[float]], check: str, bound: float) -> None:
    assert max(results[check]) <= bound, results[check]


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 1013])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_split_is_that_of_torch_chunk(rows: int, world_size: int) -> None:
    chunks = torch.arange(rows).chunk(world_size)
    for rank in range(world_size):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(owned_rows(rows, world_size, rank)) == expected


def test_the_split_holds_beyond_32_bits() -> None:
    """The released table times 16: more rows than an int32 can count, without allocating any."""
    rows, world_size = 384_006_168 * 16, 96
    ranges = [owned_rows(rows, world_size, rank) for rank in range(world_size)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == rows
    assert all(before.stop == after.start for before, after in itertools.pairwise(ranges))
    assert max(map(len, ranges)) - min(map(len, ranges)) < world_size
    assert rows > 2**31
    id_near_the_end = torch.tensor([rows - 1, 2**31 + 5])
    bounds = torch.tensor([part.stop for part in ranges])
    owners = torch.searchsorted(bounds, id_near_the_end, right=True).tolist()
    assert owners == [world_size - 1, (2**31 + 5) // len(ranges[0])]
