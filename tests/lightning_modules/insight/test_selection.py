"""Mass, recall and texts of a selection, against loops by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv41 import DeepseekV41ForCausalLM
from dsv41.schedule import LayerPlan
from lightning_modules.insight.drawing import pixels
from lightning_modules.insight.key_masks import Attended, attended
from lightning_modules.insight.selection import (
    Mass,
    mass_picture,
    masses,
    positions_read,
    positions_table,
    recalls,
    selection_recall,
)

MakeModel = Callable[..., DeepseekV41ForCausalLM]
Batch = dict[str, Tensor]

LENGTH, LIVE = 30, 21  # of the first row, and the second's tokens without padding
SELECTING = (1, 3, 4, 5)


@pytest.fixture
def seen(tiny_model: MakeModel, batch: Batch) -> list[Attended]:
    """Of weights that attend unevenly."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn." in name and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[1] ** -0.5)
            elif name.endswith("attn_sink"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return attended(model, batch)


# ------------------------------------------------------------------ what is selected


def share_by_hand(one: Attended, row: int, query: int) -> list[float]:
    """Of the mass on all visible compressed positions, summed over heads, what each has."""
    assert one.compressed is not None
    q, kv, far = (x[row].double() for x in (one.q, one.kv, one.compressed))
    scale, window = q.shape[-1] ** -0.5, one.core.window
    assert window is not None
    visible = (query + 1) // one.plan.ratio
    mass = [0.0] * visible
    for head in range(q.shape[1]):
        first = max(0, query - window + 1)
        near = sum(math.exp(scale * float(q[query, head] @ kv[t])) for t in range(first, query + 1))
        each = [math.exp(scale * float(q[query, head] @ far[t])) for t in range(visible)]
        whole = near + sum(each) + math.exp(float(one.core.attn_sink.detach()[head]))
        mass = [total + part / whole for total, part in zip(mass, each, strict=True)]
    return [part / sum(mass) for part in mass]


@pytest.mark.parametrize("row", [0, 1])
def test_shares_equal_a_loop_over_heads_and_positions(seen: list[Attended], row: int) -> None:
    found = masses(seen, row)
    assert tuple(mass.plan.layer for mass in found) == SELECTING
    for mass in found:
        one, ratio = seen[mass.plan.layer], mass.plan.ratio
        assert mass.share.dtype == torch.float64
        assert mass.share.shape == mass.selected.shape == (LENGTH, LENGTH // ratio)
        assert one.selection is not None
        for query in (0, 1, 9, 20, 29):
            chosen = [at for at in one.selection[row, query].tolist() if at >= 0]
            assert mass.selected[query].nonzero()[:, 0].tolist() == chosen
            visible = (query + 1) // ratio
            if visible == 0 or (row == 1 and query >= LIVE):
                assert not mass.share[query].any()
                continue
            assert mass.share[query, :visible].tolist() == pytest.approx(share_by_hand(one, row, query), rel=1e-5)
            assert not mass.share[query, visible:].any()
            assert float(mass.share[query].sum()) == pytest.approx(1.0)


def test_recalls_are_means_over_queries_that_have_a_choice(seen: list[Attended]) -> None:
    shares = [masses(seen, row) for row in range(2)]
    found = recalls(seen)
    assert tuple(row.plan.layer for row in found) == SELECTING
    for place, recall in enumerate(found):
        kept, chance, best = [], [], []
        for row, live in ((0, LENGTH), (1, LIVE)):
            mass = shares[row][place]
            for query in range(live):
                count, visible = int(mass.selected[query].sum()), (query + 1) // mass.plan.ratio
                if visible > count:
                    kept.append(float(mass.share[query][mass.selected[query]].sum()))
                    chance.append(count / visible)
                    best.append(float(mass.share[query].sort(descending=True).values[:count].sum()))
        assert recall.queries == len(kept) > 20
        for value, expected in ((recall.kept, kept), (recall.chance, chance), (recall.best, best)):
            assert value == pytest.approx(sum(expected) / len(expected))
        assert 0 < recall.kept < recall.best
        one = seen[recall.plan.layer]
        assert one.compressed is not None
        assert one.selection is not None
        sums = selection_recall(one.core, one.q, one.kv, one.compressed, one.selection, one.token_mask)
        assert recall.kept == float(sums[0] / sums[3])


def test_layers_without_a_choice_or_a_selection(tiny_model: MakeModel, batch: Batch) -> None:
    everything = attended(tiny_model(index_topk=15, candidate_topk_blocks=15), batch)
    assert [row.plan.layer for row in recalls(everything)] == [4, 5]
    assert [mass.plan.layer for mass in masses(everything)] == [1, 3, 4, 5]
    window = attended(tiny_model(attention="window"), batch)
    for look in (masses, recalls):
        with pytest.raises(ValueError, match=r"^model\.config\.index_source_layer_ids: no layer of this model selects"):
            look(window)


def test_the_picture_of_mass_marks_the_selection(seen: list[Attended]) -> None:
    found = masses(seen)
    figure = mass_picture(found, first=14, count=10)
    panels = figure.axes[: len(found)]
    for axes, mass in zip(panels, found, strict=True):
        positions = 24 // mass.plan.ratio
        drawn = np.ma.filled(axes.images[0].get_array(), np.nan)
        assert drawn.shape == (10, positions)
        for query in range(14, 24):
            visible = (query + 1) // mass.plan.ratio
            expected = mass.share[query, :visible] * visible
            assert drawn[query - 14, :visible].tolist() == pytest.approx(expected.tolist())
            assert np.isnan(drawn[query - 14, visible:]).all()
        dots = {tuple(dot) for dot in np.asarray(axes.collections[0].get_offsets()).astype(int).tolist()}
        assert dots == {(at, 14 + query) for query, at in mass.selected[14:24].nonzero().tolist()}
        # Queries and positions stand where the axes say.
        assert axes.images[0].get_extent() == [-0.5, positions - 0.5, 23.5, 13.5]
        low, high = axes.images[0].get_clim()
        assert low * high == pytest.approx(1.0), "white is an even spread"
        assert high > 1.1
        assert f"layer {mass.plan.layer}, {mass.plan.role}" in axes.get_title()
    assert pixels(figure).std() > 0


def test_queries_that_are_not_there(seen: list[Attended]) -> None:
    found = masses(seen)
    with pytest.raises(ValueError, match=r"^first: must lie in 0\.\.29, got 30$"):
        mass_picture(found, first=30)
    with pytest.raises(ValueError, match=r"^count: must lie in 1\.\.10, got 11$"):
        mass_picture(found, first=20, count=11)
    with pytest.raises(ValueError, match=r"^count: must lie in 1\.\.10, got 0$"):
        mass_picture(found, first=20, count=0)
    with pytest.raises(ValueError, match=r"^count: the queries 0\.\.0 see no compressed position yet"):
        mass_picture(found, first=0, count=1)
    with pytest.raises(ValueError, match=r"^query: must lie in 0\.\.29, got -1$"):
        positions_read(found[0], -1, ["a"] * LENGTH)
    with pytest.raises(ValueError, match=r"^texts: must be those of the row's 30 tokens, got 29$"):
        positions_read(found[0], 3, ["a"] * (LENGTH - 1))
    with pytest.raises(ValueError, match=r"^row: must lie in 0\.\.1, got 2$"):
        masses(seen, 2)


TEXTS = ["def", " f", "(", "|x|", "``", ")", ":", "\n", "  ", "#"]


def example() -> Mass:
    """Query 7 sees four positions of two tokens each, and selects three of them."""
    share, selected = torch.zeros(10, 5, dtype=torch.float64), torch.zeros(10, 5, dtype=torch.bool)
    share[7, :4] = torch.tensor([0.1, 0.5, 0.15, 0.25])
    selected[7, [0, 1, 3]] = True
    return Mass(LayerPlan(3, 2, "Reindex", 1, 1, 3), share, selected)


def test_texts_are_those_of_the_tokens_behind_a_position() -> None:
    read = positions_read(example(), 7, TEXTS)
    assert [(one.position, one.text) for one in read] == [(1, "(|x|"), (3, ":\n"), (0, "def f")]
    assert [one.share for one in read] == pytest.approx([0.5, 0.25, 0.1])
    assert positions_read(example(), 0, TEXTS) == []


def test_the_table_of_texts_shows_any_text_as_it_is() -> None:
    lines = positions_table(example(), 7, TEXTS).splitlines()
    assert lines[0] == "Layer 3, Reindex, ratio 2: query 7 is `\\n`, after ``` def·f(|x|``): ```."
    assert lines[4:] == [
        "| 1 | `(\\|x\\|` | 50.0% | 2.00 |",
        "| 3 | `:\\n` | 25.0% | 1.00 |",
        "| 0 | `def·f` | 10.0% | 0.40 |",
        "| all 3 selected of 4 |  | 85.0% | 1.13 |",
    ]
    few = positions_table(example(), 7, TEXTS, most=1).splitlines()
    assert few == [*lines[:5], lines[-1]]
    assert positions_table(example(), 0, TEXTS).splitlines()[4:] == ["| all 0 selected of 0 |  | 0.0% |  |"]
