"""The dynamic programme over layers equals an enumeration of every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shoal.core.errors import PlanError
from shoal.core.random import generator
from shoal.plan.strategy.layer_dp import cheapest_chain


def enumerated(seconds, units, change, budget):
    """(least time, least memory of a legal choice) over every choice of every layer."""
    layers, count = seconds.shape
    best, least = math.inf, -1
    for choice in itertools.product(range(count), repeat=layers):
        time = sum(seconds[layer, s] for layer, s in enumerate(choice))
        time += sum(change[i, a, b] for i, (a, b) in enumerate(itertools.pairwise(choice)))
        if time == math.inf:
            continue
        filled = sum(int(units[layer, s]) for layer, s in enumerate(choice))
        least = filled if least < 0 else min(least, filled)
        if filled <= budget:
            best = min(best, time)
    return best, least


def test_equals_enumeration_in_two_hundred_cases():
    infeasible = 0
    for case in range(200):
        source = generator(0, purpose="layer dp", index=case)
        layers, count = int(source.integers(1, 7)), int(source.integers(1, 6))
        if count**layers > 4096:
            layers = 5
        seconds = source.uniform(0.1, 5.0, (layers, count))
        seconds[source.uniform(size=seconds.shape) < 0.1] = math.inf
        units = source.integers(0, 9, (layers, count))
        change = source.uniform(0.0, 2.0, (layers - 1, count, count))
        change[source.uniform(size=change.shape) < 0.1] = math.inf
        budget = int(source.integers(0, 5 * layers))
        best, least = enumerated(seconds, units, change, budget)
        result = cheapest_chain(seconds, units, change, budget)
        assert result.seconds == pytest.approx(best, rel=1e-12)
        if best == math.inf:
            infeasible += 1
            assert result.choice == () and result.units == least
            continue
        assert len(result.choice) == layers and result.units <= budget
        again = sum(seconds[layer, s] for layer, s in enumerate(result.choice))
        pairs = enumerate(itertools.pairwise(result.choice))
        again += sum(change[i, a, b] for i, (a, b) in pairs)
        assert again == pytest.approx(result.seconds, rel=1e-12)
        assert result.units == sum(int(units[i, s]) for i, s in enumerate(result.choice))
    assert 20 < infeasible < 150


def test_changes_between_layers_count():
    seconds = np.array([[1.0, 2.0], [2.0, 1.0]])
    units, free = np.zeros((2, 2), dtype=np.int64), np.zeros((1, 2, 2))
    assert cheapest_chain(seconds, units, free, 0).choice == (0, 1)
    dear = free + 5.0 * (1 - np.eye(2))
    assert cheapest_chain(seconds, units, dear, 0).choice in {(0, 0), (1, 1)}


@pytest.mark.parametrize(
    ("seconds", "units", "change", "budget", "named"),
    [
        (np.ones(3), np.ones((1, 3), int), np.zeros((0, 3, 3)), 1, "seconds"),
        (np.ones((2, 2)), np.ones((2, 3), int), np.zeros((1, 2, 2)), 1, "units and change"),
        (np.ones((1, 1)), np.ones((1, 1), int), np.zeros((0, 1, 1)), -1, "budget"),
        (np.ones((1, 1)) * np.nan, np.ones((1, 1), int), np.zeros((0, 1, 1)), 1, "nan"),
        (np.ones((1, 1)), -np.ones((1, 1), int), np.zeros((0, 1, 1)), 1, "units"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(seconds, units, change, budget, named):
    with pytest.raises(PlanError, match=named):
        cheapest_chain(seconds, units, change, budget)
