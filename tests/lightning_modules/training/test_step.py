"""Sums over the micro-batches of a step and over ranks, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.model import TrainingReport
from lightning_modules.training.step import StepTotals

SCALARS = ("nats", "tokens", "live", "indexer", "balance")


def totals(first: int, dtype: torch.dtype = torch.float32) -> StepTotals:
    """Five different numbers, a load, and a reference, all following from one number."""
    report = TrainingReport(
        torch.arange(first, first + 12).view(1, 2, 6),
        torch.tensor(first + 0.25, dtype=dtype),
        torch.tensor(first + 0.75, dtype=dtype),
    )
    return StepTotals.of(
        torch.tensor(first + 0.5, dtype=dtype),
        torch.tensor(10 * first),
        torch.tensor(100 * first),
        report,
        torch.tensor(1000.0 * first, dtype=dtype),
    )


def scalars(step: StepTotals) -> list[float]:
    return [float(getattr(step, name)) for name in SCALARS]


def test_a_micro_batch_gives_its_numbers_without_their_graph() -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    report = TrainingReport(torch.ones(3, 2, 4, dtype=torch.int64), 3 * leaf, 5 * leaf)
    step = StepTotals.of(7 * leaf, torch.tensor(11), torch.tensor(13), report, torch.tensor(17.0))
    assert scalars(step) == [14.0, 11.0, 13.0, 6.0, 10.0]
    assert torch.equal(step.load, report.expert_load)
    assert float(step.reference) == 17.0
    assert not any(getattr(step, name).requires_grad for name in SCALARS)


def test_losses_that_are_not_trained_count_zero() -> None:
    nats = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    report = TrainingReport(torch.zeros(1, 2, 3, dtype=torch.int64))
    step = StepTotals.of(nats, torch.tensor(1), torch.tensor(2), report, torch.tensor(1.0))
    assert scalars(step) == [2.0, 1.0, 2.0, 0.0, 0.0]
    assert not step.indexer.requires_grad
    assert step.balance.dtype == torch.float64


def test_micro_batches_add_up_and_the_first_reference_stays() -> None:
    step = totals(1) + totals(3) + totals(20)
    assert scalars(step) == [25.5, 240.0, 2400.0, 24.75, 26.25]
    assert step.load.tolist() == [[[24 + 3 * i for i in range(6)], [42 + 3 * i for i in range(6)]]]
    assert step.load.dtype == torch.int64
    assert float(step.reference) == 1000.0


def test_ranks_add_up_in_float64_by_two_sums() -> None:
    mine, other = totals(2), totals(5)
    before = [getattr(mine, name).clone() for name in (*SCALARS, "load", "reference")]
    given: list[Tensor] = []
    others = iter((torch.tensor(scalars(other), dtype=torch.float64), other.load))

    def add_in_place(values: Tensor) -> Tensor:
        """What a rank gives is overwritten by the sum, as a collective does it."""
        given.append(values.clone())
        return values.add_(next(others))

    step = mine.over_ranks(add_in_place)
    assert len(given) == 2
    assert scalars(step) == [8.0, 70.0, 700.0, 7.5, 8.5]
    assert all(getattr(step, name).dtype == torch.float64 for name in SCALARS)
    assert all(getattr(step, name).shape == () for name in SCALARS)
    assert torch.equal(step.load, mine.load + other.load)
    assert float(step.reference) == 2000.0, "the same on all ranks already"
    after = [getattr(mine, name) for name in (*SCALARS, "load", "reference")]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_on_one_device_the_sums_are_its_own_and_exact() -> None:
    step = totals(3) + StepTotals.of(
        torch.tensor(0.5), torch.tensor(2**24 + 1), torch.tensor(2**40 + 1),
        TrainingReport(torch.ones(1, 2, 6, dtype=torch.int64)), torch.tensor(9.0),
    )  # fmt: skip
    whole = step.over_ranks(lambda values: values)
    assert scalars(whole) == [4.0, 2**24 + 31, 2**40 + 301, 3.25, 3.75], "counts beyond fp32 stay exact"
    assert torch.equal(whole.load, step.load)
    assert whole.load.data_ptr() != step.load.data_ptr()
