"""Pairs of runs: the same numbers as by hand, and what a reader is told of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lightning_modules.ablation.curves import Record
from lightning_modules.ablation.intervals import half_width, interval
from lightning_modules.ablation.pairs import Pair, pairs_of, pairs_table, unpaired_half_width

# Of Student's distribution, 97.5%, from printed tables.
T2, T4 = 4.303, 2.776


def record(variant: str, seed: int | None, loss: float) -> Record:
    """A run of which only the end is known."""
    return Record(variant, seed, Path("run"), {5: loss + 1.0, 10: loss}, {}, None, None, None, {})


RECORDS = [
    record("base", 2, 4.30),
    record("base", 0, 4.00),
    record("base", 1, 4.10),
    record("off", 2, 4.37),
    record("off", 0, 4.05),
    record("off", 1, 4.18),
    record("off", 7, 9.0),
    record("off", None, 9.0),
    record("lonely", 1, 5.0),
    record("apart", 9, 5.0),
]


def test_pairs_are_of_the_seeds_that_both_have() -> None:
    pairs = pairs_of(RECORDS, "base", "off")
    assert pairs == [Pair(0, 4.00, 4.05), Pair(1, 4.10, 4.18), Pair(2, 4.30, 4.37)]
    assert [pair.difference for pair in pairs] == pytest.approx([0.05, 0.08, 0.07])


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^base: must be one of base, off, lonely, apart, got 'on'"):
        pairs_of(RECORDS, "on", "off")
    with pytest.raises(ValueError, match=r"^variant: must be one of .*, got 'of'"):
        pairs_of(RECORDS, "base", "of")
    with pytest.raises(ValueError, match=r"^variant: apart and base have no seed in common"):
        pairs_of(RECORDS, "base", "apart")


def test_widths_are_those_of_the_textbook() -> None:
    assert half_width(0.3, 3) == pytest.approx(T2 * 0.3 / math.sqrt(3), rel=1e-3)
    # Pooled variance (s1^2 + s2^2) / 2 of equal groups, times (1/n + 1/n), with 2n - 2 degrees of freedom.
    pooled = (0.3**2 + 0.4**2) / 2
    assert unpaired_half_width(0.3, 0.4, 3) == pytest.approx(T4 * math.sqrt(pooled * 2 / 3), rel=1e-3)


def test_the_table_has_the_interval_of_the_study() -> None:
    table = pairs_table(pairs_of(RECORDS, "base", "off"))
    differences = np.array([0.05, 0.08, 0.07])
    found = interval(list(differences))
    assert found.half == pytest.approx(T2 * differences.std(ddof=1) / math.sqrt(3), rel=1e-3)
    assert "| 1 | 4.1000 | 4.1800 | +0.0800 |" in table
    assert f"| **mean** | {np.mean([4.0, 4.1, 4.3]):.4f} | 4.2000 | +0.0667 |" in table
    assert f"= [{0.2 / 3 - found.half:+.4f}, {0.2 / 3 + found.half:+.4f}], which does not contain zero" in table
    apart = unpaired_half_width(np.std([4.0, 4.1, 4.3], ddof=1), np.std([4.05, 4.18, 4.37], ddof=1), 3)
    assert f"it would be ± {apart:.4f} in place of ± {found.half:.4f}" in table


def test_an_interval_around_zero_says_so() -> None:
    assert "contains zero: either sign" in pairs_table([Pair(0, 4.0, 4.1), Pair(1, 4.0, 3.9), Pair(2, 4.0, 4.01)])


def test_one_pair_has_no_interval() -> None:
    table = pairs_table(pairs_of(RECORDS, "base", "lonely"))
    assert "One seed has no spread" in table
    assert "Paired:" not in table
