"""Bands: chosen as datasketch does; rows that share one are found, in one sort or in many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.fields.data.minhash import Bands, MinHasher, collision, optimal_bands
from shoal.fields.data.minhash import lsh as lsh_module
from shoal.fields.data.minhash.lsh import (
    KeyedRows,
    RowClusters,
    ShingleSets,
    band_keys,
    candidate_rows,
    sorted_runs,
)


@pytest.mark.parametrize("num_perm", [16, 128])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_bands_are_those_of_datasketch(threshold: float, num_perm: int) -> None:
    datasketch = pytest.importorskip("datasketch.lsh")
    theirs = datasketch._optimal_param(threshold, num_perm, 0.5, 0.5)
    assert optimal_bands(threshold, num_perm) == theirs


def test_the_collision_curve() -> None:
    """Pairs of known similarity share a band as often as the formula says."""
    cut, draw, pairs = Bands(4, 3), np.random.default_rng(1), 3000
    for both, rest in ((4, 1), (2, 1), (1, 2)):
        sets = []
        for _ in range(pairs):
            base = draw.integers(0, 2**32, both + 2 * rest)
            sets += [base[: both + rest], np.r_[base[:both], base[both + rest :]]]
        keys = band_keys(MinHasher(12).of_hashes(sets), cut)
        share = (keys[:, ::2] == keys[:, 1::2]).any(axis=0).mean()
        expected = collision(both / (both + 2 * rest), cut)
        assert abs(share - expected) < 4 * (expected * (1 - expected) / pairs) ** 0.5


def brute(keys: np.ndarray, rows: np.ndarray, n: int) -> list[int]:
    """The first row of each row's cluster, by spreading over shared keys."""
    root = list(range(n))
    changed = True
    while changed:
        changed = False
        for band in keys:
            for key in set(band.tolist()):
                some = rows[band == key]
                least = min(root[row] for row in some)
                for row in some:
                    if root[row] != least:
                        root[row], changed = least, True
    return root


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_clusters_equal_brute_force(data: Any) -> None:
    n = data.draw(st.integers(1, 30))
    numbers = st.lists(st.integers(0, 12), min_size=n, max_size=n)
    keys = np.array([data.draw(numbers) for _ in range(3)], np.uint64) << np.uint64(60)
    rows = np.arange(n)
    cut = data.draw(st.integers(0, n))
    pieces = [KeyedRows(keys[:, :cut], rows[:cut]), KeyedRows(keys[:, cut:], rows[cut:])]
    for memory in (1e9, 200.0):
        clusters = RowClusters(n)
        last = 0.0
        for done, some, of in sorted_runs(pieces, memory):
            assert done >= last
            last = done
            clusters.unite_equal(some, of)
        assert last == 1.0
        assert clusters.roots().tolist() == brute(keys, rows, n)
        found = candidate_rows(pieces, n, memory, lambda done: None)
        shared = [any((band == band[row]).sum() > 1 for band in keys) for row in range(n)]
        assert found.tolist() == shared


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    signatures = draw.integers(0, 4, (50, 8)).astype(np.uint32)
    whole = band_keys(signatures, Bands(4, 2))
    fast = RowClusters(50)
    for _, keys, rows in sorted_runs([KeyedRows(whole, np.arange(50))], 1e9):
        fast.unite_equal(keys, rows)
    roots = fast.roots().tolist()
    monkeypatch.setattr(lsh_module, "native", lambda: None)
    assert band_keys(signatures, Bands(4, 2)).tolist() == whole.tolist()
    slow = RowClusters(50)
    for _, keys, rows in sorted_runs([KeyedRows(whole, np.arange(50))], 1e9):
        slow.unite_equal(keys, rows)
    assert slow.roots().tolist() == roots


@pytest.mark.parametrize("compiled", [True, False])
def test_only_similar_rows_are_united(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(lsh_module, "native", lambda: None)
    sets = [[1, 2, 3, 4], [1, 2, 3, 5], [9], [1, 2, 3, 4, 5, 6, 7, 8], [9], []]
    hashes = np.array([x for one in sets for x in one], np.uint64)
    ends = np.cumsum([len(one) for one in sets])
    known = ShingleSets(7, [(np.arange(1, 7), hashes, ends)])  # row 0 has none
    clusters = RowClusters(7)
    clusters.unite_similar(np.zeros(6, np.uint64), np.arange(1, 7), known, 0.6)
    assert clusters.roots().tolist() == [0, 1, 1, 3, 4, 3, 6]
    assert clusters.compared == 1 + 1 + 2 + 3 + 3


def test_bands_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"threshold = 1\.5: expected a number in"):
        optimal_bands(1.5, 16)
    with pytest.raises(ConfigError, match="8 slots are needed, num_perm = 4"):
        band_keys(np.zeros((1, 4), np.uint32), Bands(4, 2))
