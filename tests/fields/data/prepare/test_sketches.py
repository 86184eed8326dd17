"""Sketches: the order of merging does not matter, and what they say of data is right."""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.fields.data.prepare import counting
from shoal.fields.data.prepare.counting import CellCounts, Frequent, Smallest, mixed, text_hashes
from shoal.fields.data.prepare.sketches import Moments, Tally, TDigest, dump_all, load_all

NUMBERS = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=30), min_size=1, max_size=6)
TEXTS = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=30), min_size=1, max_size=6)


def texts(values):
    return pa.array(values, pa.large_string())


def orders(sketches, seed):
    """Merged in order, in another order, as a tree, and after a way through JSON."""
    shuffled = [sketches[at] for at in np.random.default_rng(seed).permutation(len(sketches))]
    yield reduce(lambda a, b: a.merge(b), sketches)
    yield reduce(lambda a, b: a.merge(b), shuffled)
    level = list(sketches)
    while len(level) > 1:
        level = [
            level[at].merge(level[at + 1]) if at + 1 < len(level) else level[at]
            for at in range(0, len(level), 2)
        ]
    yield level[0]
    stored = [load_all(json.loads(json.dumps(dump_all({"x": one}))))["x"] for one in sketches]
    yield reduce(lambda a, b: b.merge(a), stored)


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.integers(0, 99))
def test_moments(parts, seed) -> None:
    rows = [np.array([[x, 1e3 - x / 2] for x in one]).reshape(-1, 2) for one in parts]
    whole = np.concatenate(rows)
    for joint in (False, True):
        for one in orders([Moments.of(part, joint=joint) for part in rows], seed):
            assert one.count == len(whole)
            if not len(whole):
                continue
            size = np.abs(whole).max() + 1
            assert np.allclose(one.mean, whole.mean(axis=0), rtol=1e-12, atol=1e-12 * size)
            assert np.allclose(one.variance, whole.var(axis=0), rtol=1e-9, atol=1e-12 * size**2)
            assert (one.low == whole.min(axis=0)).all()
            assert (one.high == whole.max(axis=0)).all()


@settings(max_examples=40, deadline=None)
@given(NUMBERS, st.integers(0, 99))
def test_quantiles_of_few_values(parts, seed) -> None:
    whole = np.sort(np.concatenate([np.array(one, float) for one in parts]))
    for one in orders([TDigest.of(np.array(part, float)) for part in parts], seed):
        assert one.weights.sum() == len(whole)
        if not len(whole):
            assert np.isnan(one.quantile(0.5))
            continue
        for share in (0.0, 0.1, 0.5, 0.9, 1.0):
            value = float(one.quantile(share))
            below = (whole < value - 1e-9).sum() / len(whole)
            above = (whole > value + 1e-9).sum() / len(whole)
            assert below <= share + 0.5 / len(whole) + 0.01
            assert above <= 1 - share + 0.5 / len(whole) + 0.01


@pytest.mark.parametrize("draw", ["normal", "lognormal", "sorted", "few"])
def test_ranks_of_many_values(draw: str) -> None:
    random = np.random.default_rng(3)
    values = {
        "normal": lambda: random.normal(size=60_000),
        "lognormal": lambda: random.lognormal(0, 3, 60_000),
        "sorted": lambda: np.arange(60_000.0),
        "few": lambda: random.integers(0, 4, 60_000).astype(float),
    }[draw]()
    shares = np.linspace(0.001, 0.999, 199)
    for one in orders([TDigest.of(part) for part in np.array_split(values, 300)], 5):
        found = one.quantile(list(shares))
        ordered = np.sort(values)
        low = np.searchsorted(ordered, found, "left") / len(values)
        high = np.searchsorted(ordered, found, "right") / len(values)
        assert np.maximum(low - shares, shares - high).max() < 0.005
        assert len(one.means) <= 1001
        if draw != "few":
            assert one.rank(float(np.quantile(values, 0.3))) == pytest.approx(0.3, abs=0.005)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.integers(0, 99), st.integers(2, 9))
def test_frequent_texts(parts, seed, most) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "TOP", most)
        whole = Counter(value for one in parts for value in one)
        total = whole.total()
        for one in orders([Frequent.of(texts(part)) for part in parts], seed):
            assert len(one.counts) <= most
            assert one.off <= total / (most + 1)
            for value, count in whole.items():
                assert count - one.off <= one.counts.get(value, 0) <= count
            if len(whole) <= most:
                assert dict(one.counts) == dict(whole)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(0, 99))
def test_smallest_hashes_and_tallies(parts, seed) -> None:
    expected = {one for part in parts for one in part}
    for one in orders([Smallest.of(text_hashes(part), 5) for part in parts], seed):
        assert one.hashes.tolist() == sorted(text_hashes(sorted(expected)).tolist())[:5]
        if len(expected) < 5:
            assert one.distinct == len(expected)
    for one in orders([Tally(Counter(part)) for part in parts], seed):
        assert one.counts == Counter(value for part in parts for value in part)


def test_distinct_values_are_estimated() -> None:
    values = np.repeat(np.arange(50_000), 3)
    sketches = [Smallest.of(mixed(part)) for part in np.array_split(values, 7)]
    for one in orders(sketches, 1):
        assert one.distinct == pytest.approx(50_000, rel=0.15)
    few = Smallest.of(mixed(np.repeat(np.arange(300), 100)))
    assert few.distinct == 300


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-100, 100), st.sampled_from("ab")), max_size=20),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 99),
)
def test_grids(parts, seed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "MAX_CELLS", 6)
        grids = list(orders([CellCounts.of(part) for part in parts], seed))
    for one in grids:
        assert len(one.cells) <= 6
        assert one.level == grids[0].level
        assert dict(one.cells) == dict(grids[0].cells)
        assert sum(one.cells.values()) == sum(map(len, parts))
