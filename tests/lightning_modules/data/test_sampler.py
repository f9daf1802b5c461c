"""The order of the rows, without a trainer."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_modules.data.rows import NO_ROW
from lightning_modules.data.sampler import OrderedBatchSampler, Position, ResumableBatchSampler, ResumableLoader


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


def _together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The batches that ranks make together, padding left out; all have the same shapes."""
    batches = []
    for parts in zip(*ranks, strict=True):
        assert len({len(part) for part in parts}) == 1
        batches.append([row for row in chain.from_iterable(zip(*parts, strict=True)) if row != NO_ROW])
    return batches


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 23, 24, 25, 26, 33])
def test_any_number_of_ranks_takes_the_same_batches(rows: int, ranks: int) -> None:
    alone = _batches(2, rows=rows)
    assert _together([_batches(2, rows=rows, rank=rank, ranks=ranks) for rank in range(ranks)]) == alone


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 10])
def test_validation_rows_keep_their_order_on_any_number_of_ranks(rows: int, ranks: int) -> None:
    samplers = [OrderedBatchSampler(rows, 4, rank, ranks) for rank in range(ranks)]
    batches = _together([list(sampler) for sampler in samplers])
    assert list(chain.from_iterable(batches)) == list(range(rows))
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert all(len(sampler) == len(batches) for sampler in samplers)


def test_bad_arguments() -> None:
    for changes, message in (
        ({"rows": 0}, "rows must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"world_size": 5}, "batch_size must be at least the number of processes, 5, got 4"),
    ):
        arguments = {"rows": 8, "batch_size": 4, "seed": 0, **changes}
        with pytest.raises(ValueError, match=message):
            ResumableBatchSampler(position=lambda: None, **arguments)
