"""Knees of latency curves."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import MachineError
from shoal.machine.probes.memory_latency import footprints
from shoal.machine.segments import levels, segment

SIZES = footprints(4096, 2**28)


def curve(knees, latencies, sizes=SIZES):
    return [latencies[sum(size > knee for knee in knees)] for size in sizes]


def test_known_knees_are_recovered_exactly():
    knees = (48 * 2**10, 2 * 2**20, 32 * 2**20)
    result = levels(SIZES, curve(knees, (1.3e-9, 4e-9, 2.5e-8, 1.1e-7)))
    assert [level.latency_s for level in result] == pytest.approx([1.3e-9, 4e-9, 2.5e-8, 1.1e-7])
    for level, knee in zip(result, knees, strict=False):
        # The knee lies between two neighbouring footprints of the curve.
        assert level.last_bytes <= knee < level.next_bytes
        assert SIZES.index(level.next_bytes) == SIZES.index(level.last_bytes) + 1
        assert level.capacity_bytes == round((level.last_bytes * level.next_bytes) ** 0.5)
    assert result[-1].next_bytes is None
    assert result[-1].capacity_bytes is None


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(4, len(SIZES) - 5), min_size=1, max_size=3, unique=True),
    steps=st.lists(st.floats(2.0, 10.0), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_noisy_knees_are_recovered_exactly(cuts, steps, seed):
    cuts = sorted(cuts)
    if any(b - a < 4 for a, b in itertools.pairwise(cuts)):
        return
    latencies = list(1e-9 * np.cumprod(steps))
    noise = np.random.default_rng(seed).uniform(0.97, 1.03, len(SIZES))
    values = np.array(curve([SIZES[cut] for cut in cuts], latencies)) * noise
    result = levels(SIZES, list(values))
    assert [level.last_bytes for level in result[:-1]] == [SIZES[cut] for cut in cuts]


def test_a_transition_is_of_no_level():
    values = curve((2**15, 2**21), (1e-9, 4e-9, 3e-8))
    middle = SIZES.index(2**21)
    values[middle] = 1.2e-8
    result = levels(SIZES, values)
    assert len(result) == 3
    assert result[1].last_bytes < 2**21 < result[1].next_bytes
    assert result[1].capacity_bytes == pytest.approx(2**21, rel=0.01)


def test_flat_is_one_level():
    assert len(levels(SIZES, [2e-9] * len(SIZES))) == 1


def test_at_most_so_many_levels():
    values = curve((2**15, 2**19, 2**24), (1e-9, 4e-9, 3e-8, 6e-8))
    result = levels(SIZES, values, most=3)
    assert [level.last_bytes for level in result[:-1]] == [2**15, 2**19]


def test_segments_are_optimal():
    # Against all ways to cut a short series.
    values = list(np.random.default_rng(5).normal(size=8))

    def cost(cuts):
        edges = [0, *cuts, len(values)]
        pieces = [values[a:b] for a, b in itertools.pairwise(edges)]
        return sum(float(np.var(p)) * len(p) + 0.3 for p in pieces)

    masks = range(2 ** (len(values) - 1))
    best = min(cost([i + 1 for i in range(7) if mask >> i & 1]) for mask in masks)
    result = segment(values, 0.3)
    assert cost([start for start, _ in result[1:]]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("sizes", "values", "text"),
    [
        ([1, 2, 3], [1.0, 1.0, 1.0], "at least 4"),
        ([1, 2, 3, 4], [1.0, 1.0, 1.0], "a latency for each"),
        ([1, 3, 2, 4], [1.0] * 4, "rising"),
        ([1, 2, 3, 4], [1.0, 0.0, 1.0, 1.0], "above zero"),
    ],
)
def test_bad_curves(sizes, values, text):
    with pytest.raises(MachineError, match=text):
        levels(sizes, values)
