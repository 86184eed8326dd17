"""Curator beside a dictionary of what each tenant may see."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shoal.fields.retrieve.index.curator.index import CuratorIndex
from shoal.fields.retrieve.index.curator.tenants import parse_tenants
from shoal.fields.retrieve.index.protocols import VectorIndexError

pytestmark = pytest.mark.filterwarnings("error")
DIM = 12


def clustered(count, seed=0):
    centres = np.random.default_rng(99).standard_normal((40, DIM)) * 3
    draw = np.random.default_rng(seed)
    picked = centres[draw.integers(0, 40, count)]
    return (picked + draw.standard_normal((count, DIM))).astype(np.float32)


def nearest(vectors, ids, query, k):
    apart = ((vectors - query) ** 2).sum(1)
    order = np.lexsort((ids, apart))[:k]
    return ids[order], apart[order]


@pytest.fixture
def index():
    made = CuratorIndex(DIM, branching=8, shortlist=8, tenants=4)
    made.train(clustered(2000))
    return made


def test_random_steps_beside_a_dictionary(index):
    """Grants, revocations, removals and searches: never another's id, and the lists stay whole."""
    draw, vectors = np.random.default_rng(1), clustered(30_000, seed=1)
    stored: dict[int, np.ndarray] = {}
    sees: dict[int, set[int]] = {tenant: set() for tenant in range(12)}
    for step in range(4000):
        tenant = int(draw.integers(12))
        what = draw.random()
        if what < 0.3 or len(stored) < 50:
            name = step
            stored[name] = vectors[step]
            index.add([name], vectors[step : step + 1], tenant=tenant)
            sees[tenant].add(name)
        elif what < 0.6:
            # As images of a region are shared: neighbours of one of them.
            names = np.array(list(stored))
            one = stored[int(draw.choice(names))]
            apart = [((stored[int(name)] - one) ** 2).sum() for name in names]
            some = names[np.argsort(apart)[: int(draw.integers(1, 30))]]
            index.grant(some, tenant)
            sees[tenant].update(map(int, some))
        elif what < 0.75 and sees[tenant]:
            some = draw.choice(list(sees[tenant]), min(len(sees[tenant]), 20), replace=False)
            assert index.revoke(some, tenant) == len(some)
            sees[tenant].difference_update(map(int, some))
        elif what < 0.85:
            some = draw.choice(list(stored), 3, replace=False)
            assert index.remove(some) == 3
            for name in map(int, some):
                del stored[name]
                for one in sees.values():
                    one.discard(name)
        elif sees[tenant]:
            query = vectors[-1 - step]
            hits = index.search(query, 10, tenant=tenant, gamma2=1e9)
            mine = np.array(sorted(sees[tenant]))
            ids, apart = nearest(np.array([stored[int(one)] for one in mine]), mine, query, 10)
            np.testing.assert_allclose(hits.distances[0, : len(ids)], apart, rtol=1e-4)
            assert set(hits.ids[0][hits.ids[0] >= 0]) <= sees[tenant]
            assert (hits.ids[0] >= 0).sum() == len(ids)
            few = index.search(query, 10, tenant=tenant, gamma1=2, gamma2=2)
            assert set(few.ids[0][few.ids[0] >= 0]) <= sees[tenant]
        if step % 100 == 0:
            assert index.broken() == 0
    assert index.broken() == 0 and len(index) == len(stored)
    assert index.counts()["rebuilt"] > 0
    for tenant, names in sees.items():
        assert list(index.ids_of(tenant)) == sorted(names)


def test_a_search_that_stops_early_still_finds_most(index):
    vectors = clustered(20_000, seed=2)
    index.add(np.arange(20_000), vectors)
    index.grant(np.arange(0, 20_000, 2), "even")
    index.grant(np.arange(0, 20_000, 50), "few")
    for tenant, step in (("even", 2), ("few", 50)):
        ids = np.arange(0, 20_000, step)
        hits = index.search(clustered(100, seed=3), 10, tenant=tenant, gamma2=64)
        wanted = [nearest(vectors[ids], ids, one, 10)[0] for one in clustered(100, seed=3)]
        shared = [len(set(a) & set(b)) for a, b in zip(hits.ids, wanted, strict=True)]
        assert np.mean(shared) > 9.3
        assert hits.stats["compared"].max() < 2 * 64 * 10
    two = index.search(clustered(100, seed=3), 10, tenant="even", gamma2=64, threads=2)
    one = index.search(clustered(100, seed=3), 10, tenant="even", gamma2=64)
    np.testing.assert_array_equal(two.ids, one.ids)


def test_expressions_of_tenants(index):
    vectors = clustered(300, seed=4)
    index.add(np.arange(300), vectors)
    sets = {"a": np.arange(0, 200), "b": np.arange(100, 300), "c": np.arange(0, 300, 3)}
    for name, ids in sets.items():
        index.grant(ids, name)
    ids = np.setdiff1d(sets["a"], np.setdiff1d(sets["c"], sets["b"]))
    query = clustered(1, seed=5)[0]
    hits = index.search(query, 20, tenant=parse_tenants("a & (b | ~c)"))
    np.testing.assert_array_equal(hits.ids[0], nearest(vectors[ids], ids, query, 20)[0])
    for wrong in ("", "a &", "(a", "a b", "a ) ", "& a", "a ? b", "~" * 60 + "a"):
        with pytest.raises(VectorIndexError, match="tenants: "):
            parse_tenants(wrong)


def test_searches_while_vectors_come_and_go(index):
    vectors = clustered(20_000, seed=6)
    index.add(np.arange(5000), vectors[:5000], tenant="one")
    failed = []

    def read():
        for query in vectors[:300]:
            hits = index.search(query, 5, tenant="two")
            failed.extend(one for one in hits.ids[0] if 0 <= one < 5000)

    index.add([10_000], vectors[:1], tenant="two")
    threads = [threading.Thread(target=read) for _ in range(2)]
    for one in threads:
        one.start()
    for begin in range(10_001, 20_000, 500):
        ids = np.arange(begin, min(begin + 500, 20_000))
        index.add(ids, vectors[ids], tenant="two")
        index.remove(ids[::2])
    for one in threads:
        one.join()
    assert not failed and index.broken() == 0


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_other_metrics(metric):
    index, vectors = CuratorIndex(DIM, metric=metric), clustered(1000)
    index.train(vectors)
    index.add(np.arange(1000), vectors, tenant=1)
    query = clustered(1, seed=7)[0]
    scaled = (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if metric == "cosine" else vectors
    )
    hits = index.search(query, 10, tenant=1)
    np.testing.assert_array_equal(hits.ids[0], np.argsort(-scaled @ query, kind="stable")[:10])


def test_memory_is_that_of_its_arrays(index):
    vectors = clustered(20_000, seed=8)
    index.add(np.arange(20_000), vectors)
    for tenant in range(10):
        index.grant(np.arange(tenant * 1000, tenant * 1000 + 6000), tenant)
    sizes = index.memory()
    assert sizes["vectors"] == 2 << 20  # one large page
    assert sizes["lists"] < 2.2 * 4 * 2 * 60_000 + 16 * 20_000 + 1e5


def test_bad_input(index):
    vectors = clustered(10)
    fresh = CuratorIndex(DIM)
    with pytest.raises(VectorIndexError, match="add before train"):
        fresh.add([1], vectors[:1])
    with pytest.raises(VectorIndexError, match="empty sample"):
        fresh.train(vectors[:0])
    with pytest.raises(VectorIndexError, match="trained already"):
        index.train(vectors)
    index.add(np.arange(10), vectors, tenant="a")
    for ids, rows, text in (
        ([3], vectors[:1], "id 3 is there already"),
        ([20, 20], vectors[:2], "20 comes twice"),
        ([20], vectors[:1, :5], r"expected \[N, 12\]"),
        ([20], vectors[:1] * np.nan, "not finite"),
        ([20, 21], vectors[:1], "2 ids for 1 vectors"),
        ([-1], vectors[:1], "from 0 to"),
        ([0.5], vectors[:1], "whole numbers"),
        (np.array([2**63], np.uint64), vectors[:1], "from 0 to"),
    ):
        with pytest.raises(VectorIndexError, match=text):
            index.add(ids, rows)
    with pytest.raises(VectorIndexError, match="id 99 is not there"):
        index.grant([1, 99], "b")
    assert "b" not in index.tenants()
    for k, options in (
        (0, {}), (10**9, {}), (3, {"threads": 0}), (3, {"gamma1": 0}), (3, {"gamma2": 0}),
        (3, {"gamma2": float("nan")}),
    ):  # fmt: skip
        with pytest.raises(VectorIndexError, match="at least 1"):
            index.search(vectors[0], k, tenant="a", **options)
    with pytest.warns(UserWarning, match="tenant 'nobody' has no vectors"):
        assert (index.search(vectors[0], 3, tenant="nobody").ids == -1).all()
    index.search(vectors[0], 3, tenant="nobody")  # said once
    hits = index.search(vectors[0], 20, tenant="a")
    assert sorted(hits.ids[0][:10]) == list(range(10)) and (hits.ids[0][10:] == -1).all()
    zero = CuratorIndex(DIM, metric="cosine")
    with pytest.raises(VectorIndexError, match="row 1 is zero"):
        zero.train(np.vstack([vectors[:1], vectors[:1] * 0]))
    with pytest.raises(VectorIndexError, match="at least"):
        CuratorIndex(0)


@pytest.mark.parametrize("dim", [33, 70, 200, 600])
def test_distances_that_end_early_find_the_same(dim, tmp_path):
    """Most of the difference lies in few directions, none of them an axis."""
    draw = np.random.default_rng(dim)
    turn = np.linalg.qr(draw.standard_normal((dim, dim)))[0]
    vectors = (draw.standard_normal((900, dim)) * 0.9 ** np.arange(dim)) @ turn
    vectors = vectors.astype(np.float32)
    index = CuratorIndex(dim, tenants=1)
    index.train(vectors)
    index.add(np.arange(600), vectors[:600], tenant=0)
    index.save(tmp_path / "index")
    for one in (index, CuratorIndex.load(tmp_path / "index"), index.relearned(300)):
        np.testing.assert_allclose(one.vectors([7, 3]), vectors[[7, 3]], rtol=1e-4, atol=1e-5)
        hits = one.search(vectors[600:], 10, tenant=0, gamma2=1e9)
        for query, ids, apart in zip(vectors[600:], hits.ids, hits.distances, strict=True):
            right, distances = nearest(vectors[:600], np.arange(600), query, 10)
            assert ids.tolist() == right.tolist()
            np.testing.assert_allclose(apart, distances, rtol=1e-4)
    with pytest.raises(VectorIndexError, match="id 600 is not there"):
        index.vectors([600])
