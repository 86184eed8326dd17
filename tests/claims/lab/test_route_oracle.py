"""The oracle of routes: never worse than any pattern, and as good by fewer questions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.claims.lab.route_oracle import BIG, best, difficulty, patterns, search
from shoal.core.errors import PlanError


def table(num_layers: int, num_tokens: int, seed: int, *, apart: bool = False) -> np.ndarray:
    """Losses of every pattern [3 ** L, N]; of layers that do not depend on each other if apart."""
    source = np.random.default_rng(seed)
    if not apart:
        return source.random((3**num_layers, num_tokens))
    own = source.random((num_layers, 3, num_tokens))
    return np.array(
        [
            sum(own[layer, route] for layer, route in enumerate(pattern))
            for pattern in itertools.product(range(3), repeat=num_layers)
        ]
    )


def asker(losses_KN: np.ndarray, num_layers: int):
    powers = 3 ** np.arange(num_layers)[::-1]
    return lambda wanted: np.take_along_axis(losses_KN, wanted @ powers, 0)


@given(seed=st.integers(0, 99), num_layers=st.integers(1, 4), data=st.data())
def test_no_pattern_within_the_budget_is_better(seed, num_layers, data) -> None:
    big = data.draw(st.none() | st.integers(0, num_layers))
    losses = table(num_layers, 5, seed)
    match = search(asker(losses, num_layers), num_layers, 5, big=big)
    every = patterns(num_layers)
    allowed = np.ones(len(every), bool) if big is None else (every == BIG).sum(1) <= big
    assert (match.losses <= losses[allowed] + 1e-12).all()
    assert big is None or ((match.routes == BIG).sum(1) <= big).all()
    assert np.array_equal(asker(losses, num_layers)(match.routes[None])[0], match.losses)


@given(seed=st.integers(0, 99))
def test_layers_that_are_apart_are_solved_by_descent_and_by_a_beam(seed) -> None:
    losses = table(4, 6, seed, apart=True)
    exact = search(asker(losses, 4), 4, 6)
    for method in ("descent", "beam"):
        match = search(asker(losses, 4), 4, 6, method=method)
        assert np.allclose(match.losses, exact.losses)
        assert match.evaluations < exact.evaluations


def test_the_approximate_ways_keep_the_budget() -> None:
    losses = table(4, 8, 3)
    exact = search(asker(losses, 4), 4, 8, big=1)
    for method in ("descent", "beam"):
        match = search(asker(losses, 4), 4, 8, big=1, method=method)
        assert ((match.routes == BIG).sum(1) <= 1).all()
        assert (match.losses >= exact.losses - 1e-12).all()
        assert np.array_equal(asker(losses, 4)(match.routes[None])[0], match.losses)


def test_a_hopeless_token_is_not_difficult() -> None:
    easy, hopeless = np.array([2.0, 9.0]), np.array([0.5, 9.0])
    assert difficulty(easy, hopeless).tolist() == [1.5, 0.0]


def test_bad_input() -> None:
    with pytest.raises(PlanError, match="budget"):
        patterns(4, big=5)
    with pytest.raises(PlanError, match="search: beam"):
        patterns(9)
    assert len(patterns(4, big=1)) == 16 + 4 * 8
    assert best(table(2, 3, 0), patterns(2)).evaluations == 9
    with pytest.raises(PlanError, match="width"):
        search(asker(table(2, 3, 0), 2), 2, 3, method="beam", width=0)
