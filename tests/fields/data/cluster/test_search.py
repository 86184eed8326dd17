"""The swap search: its oracles are the textbook, the authors' package and exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from shoal.core.native import cpu_flags
from shoal.core.parts import table
from shoal.fields.data.cluster import reference
from shoal.fields.data.cluster.protocols import ClusterError, ClusteringProblem
from shoal.fields.data.cluster.search import MedoidSearch, best_swap, eager, expand, gains, native
from shoal.fields.data.cluster.solve import solve
from shoal.fields.data.cluster.storage import STORAGES, Precomputed, Vectors, kept

METHODS = ("fasterpam", "fastpam1", "pam", "alternating", "clara", "clarans")
# How the kernel is built for processors that this one is not.
BUILDS = [(), ("-DSHOAL_SCALAR",), ("-mno-avx512f",)]
if "avx512f" in cpu_flags():
    BUILDS.append(("-mavx512f",))


def vectors(n=120, dim=4, seed=0):
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(7, dim)) * 3
    return centres[draw.integers(0, 7, n)] + draw.normal(size=(n, dim))


def matrix(n=120, seed=0):
    rows = kept(Vectors(vectors(n, seed=seed)), "full32").whole
    assert rows is not None
    return rows


def search_of(D, k, library, seed=0):
    medoids = np.random.default_rng(seed).choice(len(D), k, replace=False)
    return MedoidSearch(medoids, np.ascontiguousarray(D[medoids].T), library)


def same(a, b):
    assert a.medoids.tolist() == b.medoids.tolist()
    assert (a.swaps, a.since) == (b.swaps, b.since)
    assert a.loss == pytest.approx(b.loss, rel=1e-9)
    assert a.removal == pytest.approx(b.removal, rel=1e-9, abs=1e-9)
    for name in ("near", "next", "d1", "d2", "is_medoid"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def sound(search, D):
    """Every cache is what would be computed anew."""
    again = MedoidSearch(search.medoids, np.ascontiguousarray(D[search.medoids].T), None)
    assert np.array_equal(again.d1, search.d1)
    assert np.array_equal(again.d2, search.d2)
    objects = np.arange(search.n)
    assert np.array_equal(search.to[objects, search.near], search.d1)
    assert np.array_equal(search.to[objects, search.next], search.d2)
    assert (search.near != search.next).all()
    assert again.loss == pytest.approx(search.loss, rel=1e-9)
    assert again.removal == pytest.approx(search.removal, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("k", [2, 5, 40])
def test_native_equals_numpy(build, k) -> None:
    D, ids = matrix(133), np.arange(133)
    ours, oracle = search_of(D, k, native(*build)), search_of(D, k, None)
    same(ours, oracle)
    assert best_swap(ours, D, ids)[1:] == best_swap(oracle, D, ids)[1:]
    assert eager(ours, D, ids, ids, limit=133) == eager(oracle, D, ids, ids, limit=133)
    assert oracle.swaps
    same(ours, oracle)
    sound(ours, D)


def test_the_other_native_functions_equal_numpy() -> None:
    D = matrix(90)
    nearest = D[3].copy()
    assert gains(D[10:30], nearest) == pytest.approx(reference.gains(D[10:30], nearest))
    lower = D[np.tril_indices(90, -1)]
    for first, count in ((0, 90), (0, 1), (17, 5), (89, 1)):
        ours, oracle = np.empty((2, count, 90), np.float32)
        expand(lower, 90, first, ours)
        reference.expand(lower, 90, first, oracle)
        assert np.array_equal(ours, D[first : first + count])
        assert np.array_equal(oracle, ours)


def test_caches_stay_right_after_any_swaps() -> None:
    D, draw = matrix(80), np.random.default_rng(3)
    search = search_of(D, 6, native())
    for _ in range(60):
        place, candidate = int(draw.integers(6)), int(draw.integers(80))
        if not search.is_medoid[candidate]:
            search.loss += reference.changes(search, D[candidate])[place]
            search.swap(place, candidate, D[candidate])
            sound(search, D)


def walk(name, k, **options):
    """The medoids after each swap, of a search on one start."""
    seen = []

    def tick(done, loss, state):
        if not seen or seen[-1] != state["medoids"]:
            seen.append(state["medoids"])

    problem = ClusteringProblem(Vectors(vectors()), k, seed=4, tick=tick, **options)
    match = table("clusterer").build(name).search(problem)
    return seen, match


@pytest.mark.parametrize("k", [2, 5, 20])
def test_fastpam1_is_pam_swap_for_swap(k) -> None:
    (ours, result), (textbook, theirs) = walk("fastpam1", k), walk("pam", k)
    assert ours == textbook
    assert len(ours) == result.swaps + 1 > 2
    assert result.loss == pytest.approx(theirs.loss, rel=1e-6)


@pytest.mark.parametrize(("n", "k"), [(60, 2), (300, 10), (300, 60), (1000, 30)])
def test_fasterpam_is_the_authors_package(n, k) -> None:
    kmedoids = pytest.importorskip("kmedoids")
    for seed in range(3):
        D = matrix(n, seed)
        start = np.random.default_rng(seed).choice(n, k, replace=False)
        theirs = kmedoids.fasterpam(D, start.astype(np.uint64), n_cpu=1)
        problem = ClusteringProblem(Precomputed(D), k, start=start)
        match = table("clusterer").build("fasterpam").search(problem)
        assert match.medoids.tolist() == theirs.medoids.tolist()
        assert match.swaps == theirs.n_swap
        assert match.passes == theirs.n_iter
        assert match.loss == pytest.approx(theirs.loss, rel=1e-6)


@pytest.mark.parametrize("name", ["fasterpam", "fastpam1", "pam"])
@pytest.mark.parametrize("k", [2, 3, 9])
def test_no_swap_is_left_that_improves(name, k) -> None:
    D = matrix(90).astype(np.float64)
    problem = ClusteringProblem(Precomputed(D), k, seed=k)
    match = table("clusterer").build(name).search(problem)
    assert match.converged
    for place, candidate in itertools.product(range(k), range(90)):
        other = match.medoids.copy()
        other[place] = candidate
        assert D[:, other].min(1).sum() >= match.loss * (1 - 1e-9)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("k", [1, 2, 7, 119, 120])
def test_the_loss_is_that_of_the_medoids(name, k) -> None:
    objects = Vectors(vectors())
    solution = solve(table("clusterer").build(name), ClusteringProblem(objects, k, seed=1))
    medoids = solution.result.medoids
    assert len(set(medoids.tolist())) == k
    assert solution.result.loss == pytest.approx(solution.loss, rel=1e-6, abs=1e-9)
    to = objects.between(np.arange(120), medoids)
    assert solution.loss == pytest.approx(to.min(1).sum(), rel=1e-6, abs=1e-9)
    assert np.array_equal(to[np.arange(120), solution.labels], to.min(1))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_optimum_is_never_beaten(name, k) -> None:
    reached = 0
    for seed in range(6):
        D = matrix(11, seed).astype(np.float64)
        best = min(D[:, list(m)].min(1).sum() for m in itertools.combinations(range(11), k))
        solution = solve(
            table("clusterer").build(name), ClusteringProblem(Precomputed(D), k, seed=seed)
        )
        assert solution.loss >= best * (1 - 1e-6)
        reached += solution.loss <= best * (1 + 1e-6)
    assert reached >= {"alternating": 2, "clarans": 0}.get(name, 4)


@pytest.mark.parametrize("name", ["fasterpam", "fastpam1", "pam", "clarans"])
def test_threads_change_nothing(name) -> None:
    objects = Vectors(vectors(700))
    one = ClusteringProblem(objects, 12, seed=2)
    results = [
        table("clusterer").build(name).search(replace(one, threads=threads))
        for threads in (1, 2, 3)
    ]
    assert len({tuple(each.medoids.tolist()) for each in results}) == 1
    assert len({(each.loss, each.swaps, each.passes) for each in results}) == 1


@pytest.mark.parametrize("name", ["fasterpam", "fastpam1", "pam", "alternating", "clarans"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine", "manhattan"])
def test_storage_changes_nothing(name, metric, monkeypatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("shoal.fields.data.cluster.storage._BLOCK", 3000)  # several blocks
    X = vectors(150)
    results = [
        table("clusterer")
        .build({"name": name, "storage": storage})
        .search(ClusteringProblem(Vectors(X, metric), 9, seed=1))
        for storage in STORAGES
    ]
    assert len({tuple(each.medoids.tolist()) for each in results}) == 1
    assert results[0].loss == pytest.approx(results[2].loss, rel=1e-6)


@pytest.mark.parametrize("init", ["random", "build", "lab"])
def test_starts(init) -> None:
    D = matrix(60)
    problem = ClusteringProblem(Precomputed(D), 5, seed=3, init=init, max_iter=1)
    result = solve(table("clusterer").build("fasterpam"), problem)
    assert len(set(result.result.medoids.tolist())) == 5


def test_build_takes_what_helps_most() -> None:
    from shoal.fields.data.cluster.starts import start

    D = matrix(60)
    chosen: list[int] = []
    for _ in range(5):
        losses = [D[:, [*chosen, c]].min(1).sum(dtype=float) for c in range(60)]
        chosen.append(int(np.argmin(losses)))
    assert start("build", kept(Precomputed(D), "full32"), 5, 0).tolist() == chosen


@pytest.mark.parametrize("name", METHODS)
def test_a_search_goes_on_where_it_was_stopped(name, monkeypatch) -> None:
    monkeypatch.setattr("shoal.fields.data.cluster.storage._BLOCK", 500)
    options = {"patience": 1.0} if name == "clarans" else {}
    method = table("clusterer").build({"name": name, **options})
    problem = ClusteringProblem(Vectors(vectors(200)), 6, seed=5)
    whole = method.search(problem)
    states = []
    method.search(replace(problem, tick=lambda done, loss, state: states.append(dict(state))))
    assert len(states) >= 2
    for state in states[:: max(1, len(states) // 5)]:
        again = method.search(replace(problem, state=state))
        assert again.medoids.tolist() == whole.medoids.tolist()
        assert again.loss == pytest.approx(whole.loss, rel=1e-9)
        assert again.swaps == whole.swaps


def test_given_dissimilarities_need_not_be_symmetric() -> None:
    draw = np.random.default_rng(0)
    D = draw.random((40, 40))
    np.fill_diagonal(D, 0)
    with pytest.raises(ClusterError, match=r"not symmetric: D\[\d+, \d+\]"):
        Precomputed(D)
    objects = Precomputed(D, symmetric=False)
    match = table("clusterer").build("fasterpam").search(ClusteringProblem(objects, 4))
    assert match.loss == pytest.approx(D[:, match.medoids].min(1).sum(), rel=1e-6)
    for place, candidate in itertools.product(range(4), range(40)):
        other = match.medoids.copy()
        other[place] = candidate
        assert D[:, other].min(1).sum() >= match.loss * (1 - 1e-6)
    with pytest.raises(ClusterError, match="half of a matrix"):
        kept(objects, "condensed")


@pytest.mark.parametrize(
    ("D", "said"),
    [
        (np.zeros((3, 4)), r"shape \(3, 4\): expected a square one"),
        (np.array([[0.0, np.nan], [np.nan, 0.0]]), "row 0 has NaN"),
        (np.array([[0.0, 1.0], [np.inf, 0.0]]), "has NaN or infinity"),
        (np.array([[0.0, 1.0], [2.0, 0.0]]), "not symmetric"),
    ],
)
def test_bad_dissimilarities(D, said) -> None:
    with pytest.raises(ClusterError, match=said):
        Precomputed(D)


@pytest.mark.parametrize("k", [0, -1, 6])
def test_bad_k(k) -> None:
    with pytest.raises(ClusterError, match=f"n_clusters = {k}: expected 1 to 5"):
        solve(table("clusterer").build("fasterpam"), ClusteringProblem(Vectors(vectors(5)), k))


def test_equal_objects_are_no_trouble() -> None:
    X = np.repeat(vectors(4), 5, axis=0)
    for name in METHODS:
        solution = solve(table("clusterer").build(name), ClusteringProblem(Vectors(X), 6, seed=0))
        assert solution.loss < 1e-5 or name in ("alternating", "clarans")
        assert len(set(solution.result.medoids.tolist())) == 6


def test_alternating_is_worse_than_swaps() -> None:
    """So that nobody sells the one as the other."""
    worse = 0
    for seed in range(5):
        objects = Vectors(vectors(300, seed=seed))
        losses = {
            name: solve(
                table("clusterer").build(name), ClusteringProblem(objects, 12, seed=seed)
            ).loss
            for name in ("fasterpam", "alternating")
        }
        worse += losses["alternating"] > 1.01 * losses["fasterpam"]
    assert worse >= 3


def test_without_a_compiler_it_says_so_once(monkeypatch) -> None:
    from shoal.core.errors import BuildError

    def refuse(*_, **__):
        raise BuildError("no C++ compiler found")

    native.cache_clear()
    monkeypatch.setattr("shoal.fields.data.cluster.search.build", refuse)
    try:
        with pytest.warns(UserWarning, match="slower: no C"):
            slow, result = walk("fasterpam", 5)
        assert walk("fasterpam", 5)[0] == slow
    finally:
        native.cache_clear()
    monkeypatch.undo()
    fast, again = walk("fasterpam", 5)
    assert fast[-1] == slow[-1]
    assert again.loss == pytest.approx(result.loss)
