"""Weighted sums: the native one, that of numpy, and a sum in double precision."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.fields.federate.aggregate import sums
from shoal.fields.federate.aggregate.sums import add_weighted, all_finite, weighted_sum


def given(count, size, seed=0):
    draw = np.random.default_rng(seed)
    rows = [draw.standard_normal(size, dtype=np.float32) for _ in range(count)]
    weights = draw.random(count)
    return rows, weights, sum(np.float64(w) * row for w, row in zip(weights, rows, strict=True))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 15), (4, 17_000), (9, 300_001)])
@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_the_sum_in_double_precision(count, size, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(sums, "native", lambda: None)
    rows, weights, wanted = given(count, size)
    assert np.abs(weighted_sum(rows, weights) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_one_at_a_time_gives_the_same_bits_as_all_at_once_and_so_do_threads():
    rows, weights, _ = given(7, 400_003)
    at_once, folded = weighted_sum(rows, weights), np.full(400_003, np.nan, np.float32)
    for at, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        add_weighted(folded, [row], [weight], fresh=at == 0, threads=1)
    assert np.array_equal(at_once, folded)


def test_nothing_is_added_of_no_updates():
    out = np.ones(3, np.float32)
    add_weighted(out, [], [])
    assert out.tolist() == [1, 1, 1]
    add_weighted(out, [], [], fresh=True)
    assert out.tolist() == [0, 0, 0]


def test_updates_of_another_length_are_an_error_and_not_read_beyond_their_end():
    with pytest.raises(ValueError, match="for a sum of"):
        add_weighted(np.zeros(10, np.float32), [np.zeros(4, np.float32)], [1.0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 16_384, 99_999])
def test_a_number_that_is_not_finite_is_found(wrong, at):
    x = np.full(100_000, 3e38, np.float32)  # its sum would overflow
    assert all_finite(x)
    x[at] = wrong
    assert not all_finite(x)
