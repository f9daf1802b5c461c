"""The order of the rows, without a trainer."""

from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_modules.data.sampler import Position, ResumableBatchSampler, ResumableLoader


def _batches(
    epoch: int, batches: int = 0, rows: int = 23, seed: int = 5, rank: int = 0, ranks: int = 1
) -> list[list[int]]:
    return list(ResumableBatchSampler(rows, 4, seed, lambda: Position(epoch, batches), rank, ranks))


def test_order_depends_on_seed_and_epoch_only() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - the point is that the global state does not matter
    first = _batches(0)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert _batches(0) == first
    assert len({str(_batches(epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_each_row_comes_once_and_the_last_batch_is_kept() -> None:
    batches = _batches(3)
    assert sorted(chain.from_iterable(batches)) == list(range(23))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]


@pytest.mark.parametrize("done", range(7))
def test_it_begins_at_the_position_but_has_the_length_of_the_epoch(done: int) -> None:
    sampler = ResumableBatchSampler(23, 4, 5, lambda: Position(1, done))
    assert list(sampler) == _batches(1)[done:]
    assert len(sampler) == 6


def test_position_is_asked_for_at_each_iteration_and_not_before() -> None:
    asked = []

    def position() -> Position | None:
        asked.append(True)
        return Position(len(asked), 0) if len(asked) < 3 else None

    sampler = ResumableBatchSampler(8, 4, 5, position)
    data: Any = TensorDataset(torch.arange(8))
    loader: Any = ResumableLoader(DataLoader(data, batch_sampler=sampler))
    waiting = iter(loader)
    assert not asked
    assert [batch[0].tolist() for batch in waiting] == _batches(1, rows=8)
    assert list(sampler) == _batches(2, rows=8)
    assert list(sampler) == []


@pytest.mark.parametrize("rows", [23, 24, 25, 26, 33])
def test_ranks_share_each_global_batch(rows: int) -> None:
    ranks = [_batches(2, rows=rows, rank=rank, ranks=3) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch in batches)
    order = [row for batch in _batches(2, rows=rows) for row in batch]
    shared = [
        row for parts in zip(*ranks, strict=True) for row in chain.from_iterable(zip_longest(*parts)) if row is not None
    ]
    assert shared == order[: len(shared)]
    assert rows - len(shared) < 3


def test_bad_arguments() -> None:
    for changes, message in (
        ({"rows": 0}, "rows must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
    ):
        arguments = {"rows": 8, "batch_size": 4, "seed": 0, **changes}
        with pytest.raises(ValueError, match=message):
            ResumableBatchSampler(position=lambda: None, **arguments)
