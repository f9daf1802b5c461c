"""Row-sparse Adam against dense Adam of each row alone, written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from dsv41.engram.table import EngramTable
from lightning_modules.optim.row_adam import RowAdam

ROWS, WIDTH = 7, 3
BETAS, EPS = (0.8, 0.95), 1e-3
# Rows read in each step: 0 in every one, 1 in some, 2 once, 3 several times within a step; 4, 5 and 6 never.
STEPS = [[0, 3, 3, 1], [0], [0, 1, 3, 3, 3], [2, 0], [0, 0, 1], [0, 3]]
RATES = [0.1, 0.05, 0.2, 0.1, 0.0, 0.3]


def values_of(step: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def gradient_of(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Row-sparse with an entry per read, as `EngramTable` makes it."""
    ids = torch.tensor([STEPS[step]])
    values = values_of(step, ids.shape[1]).to(dtype)
    return torch.sparse_coo_tensor(ids, values, (ROWS, WIDTH), check_invariants=False)


def start() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def by_hand() -> tuple[list[list[float]], list[int]]:
    """Adam of one number after the other, in Python, over the steps that the row was in; and how many these were."""
    table, hits = start().tolist(), []
    for row in range(ROWS):
        count = 0
        averages = [(0.0, 0.0)] * WIDTH
        for step, (ids, rate) in enumerate(zip(STEPS, RATES, strict=True)):
            if row not in ids:
                continue
            count += 1
            values = values_of(step, len(ids))
            for column in range(WIDTH):
                gradient = sum(float(values[entry, column]) for entry, read in enumerate(ids) if read == row)
                m, v = averages[column]
                m = BETAS[0] * m + (1 - BETAS[0]) * gradient
                v = BETAS[1] * v + (1 - BETAS[1]) * gradient**2
                averages[column] = m, v
                root = math.sqrt(v / (1 - BETAS[1] ** count))
                table[row][column] -= rate * m / (1 - BETAS[0] ** count) / (root + EPS)
        hits.append(count)
    return table, hits


def run(dtype: torch.dtype, steps: range = range(len(STEPS))) -> tuple[nn.Parameter, RowAdam]:
    parameter = nn.Parameter(start().to(dtype))
    optimizer = RowAdam([parameter], lr=1.0, betas=BETAS, eps=EPS)
    for step in steps:
        parameter.grad = gradient_of(step, dtype)
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 3e-6)])
def test_each_row_is_adam_over_the_steps_that_it_was_in(dtype: torch.dtype, bound: float) -> None:
    parameter, optimizer = run(dtype)
    table, hits = by_hand()
    expected = torch.tensor(table, dtype=torch.float64)
    assert (parameter.detach().double() - expected).abs().max() < bound
    assert hits == [6, 3, 1, 3, 0, 0, 0]
    state = optimizer.state[parameter]
    assert state["hits"].flatten().tolist() == hits
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        "exp_avg": ((ROWS, WIDTH), dtype),
        "exp_avg_sq": ((ROWS, WIDTH), dtype),
        "hits": ((ROWS, 1), dtype),
    }


def test_a_row_in_every_step_is_torchs_adam() -> None:
    parameter, theirs = nn.Parameter(start()), nn.Parameter(start())
    optimizer, adam = RowAdam([parameter], 0.1, BETAS, EPS), Adam([theirs], 0.1, BETAS, EPS)
    for step in range(20):
        theirs.grad = values_of(step, ROWS)
        parameter.grad = theirs.grad.to_sparse(1)
        optimizer.step()
        adam.step()
    torch.testing.assert_close(parameter, theirs, rtol=1e-13, atol=1e-14)


def test_a_row_that_is_not_hit_keeps_value_and_averages_bit_for_bit() -> None:
    parameter, optimizer = run(torch.float32, range(3))
    before = parameter.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    parameter.grad = gradient_of(3, torch.float32)
    optimizer.step()
    still = [row for row in range(ROWS) if row not in STEPS[3]]
    assert torch.equal(parameter[still], before[still])
    assert all(torch.equal(value[still], state[key][still]) for key, value in optimizer.state[parameter].items())
    assert state["exp_avg"][1].abs().min() > 0, "row 1 has averages that dense Adam would go on applying"
    assert (parameter[[0, 2]] != before[[0, 2]]).all()


def test_a_row_whose_entries_add_up_to_zero_was_not_hit() -> None:
    """Rows of padding are read without effect; how many there are must not matter."""
    parameter, optimizer = run(torch.float64, range(1))
    before = parameter.detach().clone()
    entries = torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0], dtype=torch.float64)[:, None].expand(5, WIDTH)
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1, 5, 3]]), entries, (ROWS, WIDTH), check_invariants=False, is_coalesced=False
    )
    optimizer.step()
    assert optimizer.state[parameter]["hits"].flatten().tolist() == [1, 1, 0, 2, 0, 0, 0]
    moved = (parameter != before).any(-1)
    assert moved.nonzero().flatten().tolist() == [3]


def test_no_row_at_all_is_a_step_that_changes_nothing() -> None:
    parameter = nn.Parameter(start())
    optimizer = RowAdam([parameter, nn.Parameter(start())])
    parameter.grad = torch.zeros(ROWS, WIDTH, dtype=torch.float64).to_sparse(1)
    optimizer.step()
    assert torch.equal(parameter, start())
    assert list(optimizer.state) == [parameter], "state on every rank alike, also where no row was read"
    assert optimizer.state[parameter]["hits"].sum() == 0


def test_it_trains_the_rows_that_a_table_has_read() -> None:
    table = EngramTable(50, 4, 1.0, sparse_gradient=True)
    before = table.weight.detach().clone()
    optimizer = RowAdam(table.parameters(), lr=0.1)
    table(torch.tensor([[3, 3], [7, 3]])).square().sum().backward()
    optimizer.step()
    moved = (table.weight != before).all(-1)
    assert moved.nonzero().flatten().tolist() == [3, 7]
    assert torch.equal(table.weight[~moved], before[~moved])
    torch.testing.assert_close(before[moved] - table.weight[moved], 0.1 * before[moved].sign(), rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    "gradient", [torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH).to_sparse(2)], ids=["dense", "by element"]
)
def test_other_gradients_are_refused(gradient: Tensor) -> None:
    parameter = nn.Parameter(start().float())
    parameter.grad = gradient
    with pytest.raises(TypeError, match="row-sparse gradients only; see EngramTable"):
        RowAdam([parameter]).step()


def test_a_dtype_that_cannot_count_is_refused() -> None:
    with pytest.raises(TypeError, match=r"float32 and float64 tables, got torch\.bfloat16"):
        RowAdam([nn.Parameter(start().bfloat16())])


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    unbroken, _ = run(torch.float32)
    parameter, optimizer = run(torch.float32, range(3))
    other = nn.Parameter(parameter.detach().clone())
    going_on: Any = RowAdam([other])
    going_on.load_state_dict(optimizer.state_dict())
    for step in range(3, len(STEPS)):
        other.grad = gradient_of(step, torch.float32)
        going_on.param_groups[0]["lr"] = RATES[step]
        going_on.step()
    assert torch.equal(other, unbroken)
