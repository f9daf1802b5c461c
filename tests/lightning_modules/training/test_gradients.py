"""Gradients as plain tensors, their norms by part, and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_modules.training.checks import NonFiniteError, require_finite_gradients
from lightning_modules.training.gradients import (
    GradientNorms,
    clip_by_norm_,
    clip_values_,
    gradient_norms,
    local_gradients,
    scale_,
)

TABLE = "model.layers.1.engram.embed.weight"
NAMES = {
    TABLE: "engram_tables",
    "model.layers.0.attn_hc.fn": "mhc",
    "model.layers.0.ffn_hc.base": "mhc",
    "model.layers.1.attn.indexer.wq_b.weight": "indexer",
    "model.layers.1.attn.indexer.k_norm.weight": "indexer",
    "model.layers.1.ffn.gate.weight": "router",
    "model.layers.1.engram.wkv.weight": "rest",
    "lm_head.weight": "rest",
}
CPU = torch.device("cpu")


def parameters(*without: str) -> dict[str, nn.Parameter]:
    """One of each kind with a gradient, the table's row-sparse with row 2 twice; names or parts `without` have none."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name in NAMES:
        parameter = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
        gradient = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        if name == TABLE:
            gradient = torch.sparse_coo_tensor(
                torch.tensor([[2, 4, 2]]), gradient[:3], (5, 3), check_invariants=False, is_coalesced=False
            )
        if name not in without and NAMES[name] not in without:
            parameter.grad = gradient
        made[name] = parameter
    return made


def dense(made: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad.to_dense().clone() for name, p in made.items() if p.grad is not None}


def norms_of(gradients: dict[str, Tensor]) -> GradientNorms:
    return gradient_norms(gradients, CPU, lambda total: total)


def norm_of(gradients: dict[str, Tensor], *parts: str) -> float:
    return float(torch.cat([g.flatten() for name, g in gradients.items() if NAMES[name] in parts]).norm())


def test_what_is_changed_is_the_gradient_itself() -> None:
    made = parameters("router")
    before = dense(made)
    gradients = local_gradients(made)
    assert gradients.keys() == before.keys() == NAMES.keys() - {"model.layers.1.ffn.gate.weight"}
    scale_(gradients, torch.tensor(0.5))
    assert all(torch.equal(value, before[name] / 2) for name, value in dense(made).items())


def test_entries_of_a_row_are_added_up_once() -> None:
    made = parameters()
    before = dense(made)[TABLE]
    values = local_gradients(made)[TABLE]
    stored = made[TABLE].grad
    assert stored is not None
    assert stored.is_coalesced()
    assert stored.values().data_ptr() == values.data_ptr()
    assert torch.equal(values, before[[2, 4]])
    again = local_gradients(made)[TABLE]
    assert made[TABLE].grad is stored
    assert again.data_ptr() == values.data_ptr()


def test_norms_are_those_of_each_part_and_of_all() -> None:
    made = parameters("indexer")
    expected = dense(made)
    norms = norms_of(local_gradients(made))
    assert list(norms.squares) == ["engram_tables", "mhc", "router", "rest"]
    for part in norms.squares:
        assert float(norms.norm((part,))) == pytest.approx(norm_of(expected, part), rel=1e-14)
    assert float(norms.norm()) == pytest.approx(norm_of(expected, *NAMES.values()), rel=1e-14)
    assert norms.norm(("indexer",)) == 0
    assert norms.norm().dtype == torch.float64


def test_rows_on_other_ranks_count_once_and_one_sum_is_enough() -> None:
    """Two ranks: this one with the first rows of everything, the other with the rest."""
    made = parameters()
    whole = dense(made)
    calls = []

    def of_rank(rows: slice) -> Tensor:
        seen: list[Tensor] = []
        gradient_norms({name: g[rows] for name, g in whole.items()}, CPU, lambda own: seen.append(own.clone()) or own)
        return seen[0]

    def reduce(own: Tensor) -> Tensor:
        calls.append(own)
        return own + of_rank(slice(2, None))

    norms = gradient_norms({name: g[:2] for name, g in whole.items()}, CPU, reduce)
    assert len(calls) == 1
    for part, square in norms_of(whole).squares.items():
        assert float(norms.squares[part]) == pytest.approx(float(square), rel=1e-14)


def test_norms_of_fp32_are_exact_to_seven_digits_however_many_elements() -> None:
    """One sum over these elements in fp32 is off by 6e-5, and not the same for another cut."""
    gradient = torch.randn(100_000, 32, generator=torch.Generator().manual_seed(0))
    whole = float(norms_of({TABLE: gradient}).norm())
    assert whole == pytest.approx(float(gradient.double().norm()), rel=1e-8)
    halves = [float(norms_of({TABLE: part}).squares["engram_tables"]) for part in gradient.split(60_000)]
    assert sum(halves) == pytest.approx(whole**2, rel=1e-14)
    vector = torch.randn(9, generator=torch.Generator().manual_seed(0))
    parts = [float(norms_of({"lm_head.weight": part}).squares["rest"]) for part in vector.split(2)]
    assert sum(parts) == pytest.approx(float(vector.double().norm()) ** 2, rel=1e-14)


def test_clipping_without_an_indexer_is_torchs() -> None:
    for limit in (0.5, 1e6):
        made, theirs = parameters("indexer"), parameters("indexer")
        for parameter in theirs.values():
            parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), limit, foreach=True)
        gradients = local_gradients(made)
        clip_by_norm_(gradients, norms_of(gradients), limit)
        for name, value in dense(made).items():
            torch.testing.assert_close(value, theirs[name].grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_indexers_gradient_is_clipped_by_its_own_norm(size: float) -> None:
    """However large it is, nothing else is scaled otherwise than without it; and the other way round."""
    made, without = parameters(), parameters("indexer")
    for name, parameter in made.items():
        if NAMES[name] == "indexer":
            assert parameter.grad is not None
            parameter.grad *= size
    before = dense(made)
    for parts in (made, without):
        gradients = local_gradients(parts)
        clip_by_norm_(gradients, norms_of(gradients), 0.7)
    after = dense(made)
    for name, value in dense(without).items():
        assert torch.equal(after[name], value), name
    own = norm_of(before, "indexer")
    factor = min(1.0, 0.7 / (own + 1e-6))
    assert (factor < 1) == (size >= 1), "both cases are there"
    for name, part in NAMES.items():
        if part == "indexer":
            torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-14, atol=0)
    assert norm_of(after, *set(NAMES.values()) - {"indexer"}) == pytest.approx(0.7, rel=1e-5)


def test_values_are_clipped_after_entries_of_a_row_are_added_up() -> None:
    made = parameters()
    expected = {name: value.clamp(-0.3, 0.3) for name, value in dense(made).items()}
    clip_values_(local_gradients(made), 0.3)
    assert all(torch.equal(value, expected[name]) for name, value in dense(made).items())


def test_a_row_that_is_not_finite_is_named() -> None:
    made = parameters()
    gradients = local_gradients(made)
    require_finite_gradients(norms_of(gradients).norm(), gradients, 3)
    gradients[TABLE][1, 2] = float("inf")
    with pytest.raises(NonFiniteError, match=rf"norm is inf in optimizer step 3; gradients .*: {TABLE}$"):
        require_finite_gradients(norms_of(gradients).norm(), gradients, 3)


def test_nothing_to_clip_is_no_error() -> None:
    norms = norms_of({})
    assert norms.squares == {}
    assert norms.norm() == 0
    clip_by_norm_({}, norms, 1.0)
    scale_({}, torch.tensor(2.0))
