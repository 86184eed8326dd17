"""Delays that vary by chance: nothing is named without a fault, and with one nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from shoal.core.errors import ConfigError
from shoal.train.watch.c4d import C4D
from shoal.train.watch.outliers import fit

SIGMA = 0.2


def healthy(world: int, source: np.random.Generator, sigma: float = SIGMA) -> NDArray[np.float64]:
    """Delays of a log-normal distribution between ranks; none of a rank to itself."""
    matrix = np.exp(source.normal(0.0, sigma, (world, world)))
    np.fill_diagonal(matrix, np.nan)
    return matrix


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 5, 8, 16, 32])
def test_at_most_one_of_a_thousand_healthy_matrices_raises_an_alarm(world: int) -> None:
    source = np.random.default_rng(world)
    assert sum(bool(C4D().judge(healthy(world, source))[0]) for _ in range(1000)) <= 1


@pytest.mark.parametrize("place", ["sender", "receiver", "rank"])
@pytest.mark.parametrize("world", [8, 16])
def test_slow_ends_are_named_alone(world: int, place: str) -> None:
    source = np.random.default_rng(17)
    right = 0
    for _ in range(200):
        matrix, rank = healthy(world, source), int(source.integers(world))
        factor = source.uniform(3.0, 8.0)
        if place != "receiver":
            matrix[rank] *= factor
        if place != "sender":
            matrix[:, rank] *= factor
        named = [(fault.place, fault.ranks) for fault in C4D().judge(matrix)[0]]
        right += named == [(place, (rank,))]
    assert right >= 199


@pytest.mark.parametrize("world", [8, 16])
def test_slow_links_are_named_alone_as_often_as_one_cell_of_many_can_be(world: int) -> None:
    source = np.random.default_rng(18)
    # What knows middle and scale, and raises one alarm in a thousand, finds so many and no more.
    limit = norm.isf(1e-3 / (world * (world - 1)))
    right, possible = 0, 0.0
    for _ in range(400):
        matrix, factor = healthy(world, source), source.uniform(3.0, 8.0)
        link = tuple(source.choice(world, 2, replace=False).tolist())
        matrix[link] *= factor
        possible += norm.cdf(np.log(factor) / SIGMA - limit)
        named = [(fault.place, fault.ranks) for fault in C4D().judge(matrix)[0]]
        right += named == [("link", link)]
    assert right >= 0.95 * possible


def test_slow_values_move_neither_middle_nor_scale() -> None:
    source = np.random.default_rng(3)
    values = np.exp(source.normal(1.0, SIGMA, 240))
    clean = fit(values)
    values[:80] *= 4.0
    dirty = fit(values)
    assert dirty.middle == pytest.approx(clean.middle, abs=0.05)
    assert dirty.scale == pytest.approx(clean.scale, rel=0.2)
    assert clean.scale == pytest.approx(SIGMA, rel=0.1)


def test_wrong_option() -> None:
    with pytest.raises(ConfigError, match=r"false_alarms = 0"):
        C4D(false_alarms=0.0)


@pytest.mark.parametrize("world", [4, 5])
@pytest.mark.parametrize("which", ["sender", "receiver", "rank"])
def test_a_slow_end_among_few_ranks_is_named_where_messages_of_another_are_not_known(
    world: int, which: str
) -> None:
    """As recorded from ranks behind shaped links: what is odd is most of all that is known."""
    source = np.random.default_rng(7)
    for rank in range(world):
        matrix = np.exp(source.normal(0, 0.01, (world, world)))
        matrix[(rank + 1) % world] = np.nan
        slow = source.uniform(4.4, 6.5, world)
        # What a slow end is answered is slow as well, but less so.
        answered = source.uniform(2.0, 2.5, world) if which != "rank" else slow
        matrix[rank] = answered if which == "receiver" else slow
        matrix[:, rank] = answered if which == "sender" else slow
        np.fill_diagonal(matrix, np.nan)
        faults, _ = C4D().judge(matrix)
        assert [(fault.place, fault.ranks) for fault in faults] == [(which, (rank,))], matrix
