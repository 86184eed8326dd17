"""Selectors: the best rows that leave every class its floor, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.fields.data.prune.selectors import KeepBalanced, KeepEasiest, KeepHardest


def test_hardest_and_easiest() -> None:
    scores = np.array([3.0, 1.0, 2.0, 3.0, 0.0])
    assert KeepHardest().select(scores, 3).tolist() == [0, 2, 3]
    assert KeepHardest().select(scores, 1).tolist() == [0]
    assert KeepEasiest().select(scores, 2).tolist() == [1, 4]
    assert KeepBalanced(side="hard").select(scores, 3).tolist() == [0, 2, 3]


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.integers(0, 20), min_size=2, max_size=9),
    data=st.data(),
    side=st.sampled_from(["hard", "easy"]),
    floor=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_no_other_choice_is_better(
    scores: list[int], data: st.DataObject, side: str, floor: float
) -> None:
    n = len(scores)
    groups = np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    budget = data.draw(st.integers(1, n))
    part = KeepBalanced(side=side, floor=floor)  # type: ignore[arg-type]
    sizes = np.bincount(groups)
    floors = [int(np.ceil(round(floor * budget * size / n, 9))) for size in sizes]
    values = np.array(scores, float)
    if sum(floors) > budget:
        with pytest.raises(DataError, match="rows at least"):
            part.select(values, budget, groups=groups)
        return
    chosen = part.select(values, budget, groups=groups)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == budget

    def allowed(some: tuple[int, ...]) -> bool:
        kept = np.bincount(groups[list(some)], minlength=len(sizes))
        return bool((kept >= floors).all())

    assert allowed(tuple(chosen))
    totals = [
        values[list(some)].sum()
        for some in itertools.combinations(range(n), budget)
        if allowed(some)
    ]
    best = max(totals) if side == "hard" else min(totals)
    assert values[chosen].sum() == best


@given(st.integers(2, 400), st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_the_floor_is_met_exactly(n: int, keep: float) -> None:
    """A class of the easiest rows keeps its floor and no row more, where harder ones are left."""
    groups = np.repeat([0, 1], [n, 3 * n])
    budget = max(1, round(keep * 4 * n))
    assume(2 <= budget <= 3 * n)
    floors = KeepBalanced(side="hard").floors(np.bincount(groups), budget)
    scores = np.arange(4 * n, dtype=float)
    chosen = KeepBalanced(side="hard").select(scores, budget, groups=groups)
    assert int((groups[chosen] == 0).sum()) == floors[0] == int(np.ceil(round(0.125 * budget, 9)))


def test_the_theory_decides_the_side() -> None:
    scores = np.arange(200.0)
    assert KeepBalanced().select(scores, 100, dim=2).tolist() == list(range(100, 200))
    assert KeepBalanced().select(scores, 100, dim=200).tolist() == list(range(100))


def test_bad_input() -> None:
    groups = np.repeat([0, 1], [3, 97])
    with pytest.raises(DataError, match="class 0 has 3 rows, and at_least = 5"):
        KeepBalanced(at_least=5).select(np.zeros(100), 50, groups=groups)
    with pytest.raises(DataError, match="2 classes keep 6 rows at least, and 4 are kept"):
        KeepBalanced(at_least=3).select(np.zeros(100), 4, groups=groups)
    for floor in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="floor"):
            KeepBalanced(floor=floor)
