"""Baskets from lists, Arrow, matrices, frames, the generator and the package index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
from scipy import sparse

from shoal.core.errors import ConfigError
from shoal.fields.data.mine.baskets import from_arrow, from_lists, from_matrix
from shoal.fields.data.mine.generator import heaton_baskets
from shoal.fields.data.mine.protocols import MineError

item = st.one_of(st.integers(-5, 10**12), st.text(max_size=3))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(item, max_size=5), max_size=8))
def test_lists_come_back(rows) -> None:
    assert from_lists(rows).to_lists() == rows


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.none() | st.lists(st.text(max_size=2), max_size=4), max_size=8))
def test_arrow_comes_back(rows) -> None:
    column = pa.array(rows, pa.list_(pa.string()))
    baskets = from_arrow(column)
    assert baskets.to_lists() == [row or [] for row in rows]
    assert baskets.to_arrow().to_pylist() == [row or [] for row in rows]
    halves = pa.chunked_array([column[: len(rows) // 2], column[len(rows) // 2 :]])
    assert from_arrow(halves).to_lists() == [row or [] for row in rows]


def test_numbers_of_arrow() -> None:
    for kind in (pa.int8(), pa.int64(), pa.uint16(), pa.uint64()):
        column = pa.array([[3, 1], [], [3]], pa.list_(kind))
        assert from_arrow(column).to_lists() == [[3, 1], [], [3]]
    sliced = pa.array([[1], [2, 3], [4]])[1:]
    assert from_arrow(sliced).to_lists() == [[2, 3], [4]]


def test_matrices() -> None:
    dense = np.array([[0, 1, 2], [0, 0, 0], [1, -1, 0]])
    expected = [[1, 2], [], [0]]
    assert from_matrix(dense).to_lists() == expected
    assert from_matrix(sparse.csr_array(dense)).to_lists() == expected
    assert from_matrix(dense > 0, ["a", "b", "c"]).to_lists() == [["b", "c"], [], ["a"]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], 2], "basket 1: 2: expected a list"),
        (["ab", "c"], "basket 0: 'ab' is text"),
        ([["a", None]], "None or NaN"),
        ([["a", float("nan")]], "None or NaN"),
        ([[["a"]]], "an item cannot be used"),
    ],
)
def test_what_is_no_basket(rows, message) -> None:
    with pytest.raises(MineError, match=message):
        from_lists(rows)


def test_what_arrow_cannot_be_baskets() -> None:
    for column, message in (
        (pa.array([1, 2]), "a column of int64"),
        (pa.array([["a", None]]), "1 items are null"),
        (pa.array([[["a"]]]), "expected numbers or text"),
    ):
        with pytest.raises(MineError, match=message):
            from_arrow(column)


def test_generated_baskets() -> None:
    baskets = heaton_baskets(3000, 8, 0.5, seed=4)
    rows = baskets.to_lists()
    assert len(rows) == 3000
    assert all(len(set(row)) == len(row) >= 1 for row in rows)
    planted = [frozenset(name for name in row if name[0] == "F") for row in rows]
    assert 0.45 < np.mean([bool(one) for one in planted]) < 0.55
    assert len(set(planted)) <= 101
    lengths = np.array([len(row) for row in rows if not any(name[0] == "F" for name in row)])
    assert set(lengths.tolist()) == set(range(1, 9))
    again = heaton_baskets(3000, 8, 0.5, seed=4)
    assert np.array_equal(baskets.ids, again.ids)
    assert not np.array_equal(
        baskets.ids, heaton_baskets(3000, 8, 0.5, seed=5).ids[: len(baskets.ids)]
    )


@pytest.mark.parametrize("given", [(0, 5, 0.5), (5, 0, 0.5), (5, 5, 1.5), (5, 60_000, 0.5)])
def test_generator_bounds(given) -> None:
    with pytest.raises(ConfigError):
        heaton_baskets(*given)
