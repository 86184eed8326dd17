"""FastRP beside its dense formula, and what must hold of rows that are computed apart."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import pytest
from sklearn.random_projection import SparseRandomProjection

from shoal.core.errors import ConfigError, MissingExtraError
from shoal.core.parts import table
from shoal.fields.graph import CSRGraph, FastRPModel, NodeLabels, embed
from shoal.fields.graph.embedding.fastrp.native import projection
from shoal.fields.graph.embedding.judging import divided, judged_f1, left_out_f1
from shoal.fields.graph.embedding.protocols import EmbeddingError

WEIGHTS = (0.5, 1.0, 6.0, 1.0)


def random_graph(nodes=300, edges=900, *, heavy=False, directed=False, seed=0):
    draw = np.random.default_rng(seed)
    # A hub of all nodes but the last three, which have no neighbours.
    ends = draw.integers(0, nodes - 3, (2, edges))
    ends[0, : edges // 3] = 1
    weight = draw.uniform(0.5, 3, edges).astype(np.float32) if heavy else None
    return CSRGraph.from_edges(*ends, weight, num_nodes=nodes, directed=directed)


def dense(graph, *, dim, weights, beta, s, seed, normalise):
    """The formula of the paper, in float64."""
    n = graph.num_nodes
    S = np.zeros((n, n))
    rows, columns = graph.edges()
    S[rows, columns] = 1 if graph.weight is None else graph.weight
    degree = S.sum(1)
    linked = degree > 0
    A = S / np.where(linked, degree, 1)[:, None]
    L = np.where(linked, (np.where(linked, degree, 1) / degree.sum()) ** beta, beta == 0)
    R = projection(graph.keys(), dim, s, seed) * math.sqrt(s)
    total = np.zeros((n, dim))
    N = L[:, None] * R
    for alpha in weights:
        N = A @ N
        length = np.linalg.norm(N, axis=1, keepdims=True)
        total += alpha * (N / np.where(length > 0, length, 1) if normalise else N)
    return total


@pytest.mark.parametrize("beta", [0.0, -0.9, 0.35])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("heavy", "directed"), [(False, False), (True, False), (True, True)])
def test_equals_the_dense_formula(beta, normalise, heavy, directed):
    graph = random_graph(heavy=heavy, directed=directed)
    options = {"dim": 70, "weights": WEIGHTS, "beta": beta, "s": 3.0, "normalise": normalise}
    model = FastRPModel(graph, seed=5, **options)
    wanted = dense(graph, seed=5, **options)
    np.testing.assert_allclose(model.vectors, wanted, atol=1e-5 * np.abs(wanted).max())
    alone = np.flatnonzero(np.diff(graph.indptr) == 0)
    assert len(alone) >= 3 and model.isolated.tolist() == alone.tolist()
    assert not model.vectors[alone].any()


@pytest.mark.parametrize("dim", [1, 15, 16, 100, 128, 300, 512])
def test_any_number_of_columns(dim):
    graph = random_graph(60, 200)
    options = {"dim": dim, "weights": (0.0, 1.0), "beta": 0.0, "s": 2.0, "normalise": False}
    model = FastRPModel(graph, seed=1, **options)
    np.testing.assert_allclose(model.vectors, dense(graph, seed=1, **options), atol=2e-6)


def test_long_rows_are_the_same_on_any_number_of_threads():
    draw = np.random.default_rng(0)
    ends = draw.integers(0, 20_000, (2, 30_000))
    ends[0, :20_000] = 7  # a hub of several segments
    graph = CSRGraph.from_edges(*ends, draw.uniform(0.5, 2, 30_000), num_nodes=20_000)
    assert np.diff(graph.indptr).max() > 3 * 4096
    one = FastRPModel(graph, dim=40, beta=0.3, threads=1).vectors
    np.testing.assert_array_equal(one, FastRPModel(graph, dim=40, beta=0.3, threads=5).vectors)
    rows, columns = graph.edges()
    hub = columns[rows == 7]
    first = FastRPModel(graph, dim=40, weights=(1.0,), normalise=False, s=3.0)
    R = projection(hub, 40, 3.0, 0) * math.sqrt(3.0)
    weight = graph.weight[rows == 7].astype(np.float64)
    np.testing.assert_allclose(first.vectors[7], weight @ R / weight.sum(), atol=1e-6)


def test_rows_of_the_projection():
    keys = np.array([5, -3, 2**62, 0])
    rows = projection(keys, 64, 3.0, 9)
    np.testing.assert_array_equal(rows[2:3], projection(keys[2:3], 64, 3.0, 9))
    np.testing.assert_array_equal(rows[:, :10], projection(keys, 10, 3.0, 9))
    assert (rows != projection(keys, 64, 3.0, 10)).any()
    many = projection(np.arange(20_000), 128, 3.0, 0, threads=2)
    np.testing.assert_array_equal(many, projection(np.arange(20_000), 128, 3.0, 0))
    # Of 2.56 million numbers shares are this near to what is wanted (six deviations).
    assert abs((many != 0).mean() - 1 / 3) < 6 * math.sqrt(2 / 9 / many.size)
    assert abs(many.mean()) < 6 * math.sqrt(1 / 3 / many.size)
    assert (projection(keys, 64, 1.0, 0) != 0).all()


def test_inner_products_are_kept():
    """E[R R^T] = d I, and the distortion is that of Johnson and Lindenstrauss, over 200 seeds."""
    dim, total, worst = 1024, np.zeros((8, 8)), 0.0
    draw = np.random.default_rng(0)
    x = draw.standard_normal((30, 60))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for seed in range(200):
        R = projection(np.arange(60), dim, 3.0, seed) * math.sqrt(3.0)
        total += (R @ R.T)[:8, :8] / 200
        y = x @ R / math.sqrt(dim)
        worst = max(worst, np.abs(y @ y.T - x @ x.T).max())
    # The mean of 200 sums of 1024 products of variance 1 (3 - 1 on the diagonal): six deviations.
    np.testing.assert_allclose(total, dim * np.eye(8), atol=6 * math.sqrt(2 * dim / 200))
    # 200 * 30 * 30 inner products, each off by more than t with chance 4 exp(-d (t^2/2 - t^3/3)/2).
    bound = next(
        t for t in np.arange(0.05, 1, 0.01)
        if 200 * 900 * 4 * math.exp(-dim * (t**2 / 2 - t**3 / 3) / 2) < 1e-3
    )  # fmt: skip
    assert worst < bound < 0.5


def test_one_power_without_degrees_is_that_of_scikit_learn():
    graph = random_graph(600, 2400)
    dim = 512
    ours = FastRPModel(graph, dim=dim, weights=(1.0,), normalise=False).vectors / math.sqrt(dim)
    rows, columns = graph.edges()
    A = np.zeros((600, 600))
    A[rows, columns] = 1
    A /= np.maximum(A.sum(1, keepdims=True), 1)
    theirs = SparseRandomProjection(dim, density=1 / 3, random_state=0).fit(A)
    values = np.unique(np.round(theirs.components_.data * math.sqrt(dim), 5))
    np.testing.assert_allclose(values, [-math.sqrt(3), math.sqrt(3)], atol=1e-4)
    share = theirs.components_.nnz / (600 * dim)
    assert abs(share - (projection(graph.keys(), dim, 3.0, 0) != 0).mean()) < 0.01
    theirs = theirs.transform(A)
    for vectors in (ours, np.asarray(theirs)):
        error = np.abs(vectors @ vectors.T - A @ A.T)
        assert error.mean() < 0.02 and error.max() < 0.35
    assert abs(ours.std() / theirs.std() - 1) < 0.05


@pytest.mark.parametrize("named", [False, True])
def test_other_numbers_of_the_nodes_permute_the_rows_exactly(named):
    graph = random_graph(heavy=True)
    names = np.array([f"node {one:03}" for one in range(300)]) if named else np.arange(300)
    order = np.random.default_rng(3).permutation(300)
    rows, columns = graph.edges()
    place = np.argsort(order)
    once = rows < columns
    other = CSRGraph.from_edges(
        place[rows[once]], place[columns[once]], graph.weight[once], ids=names[order]
    )
    first = CSRGraph(graph.indptr, graph.indices, graph.weight, names)
    a, b = (FastRPModel(one, dim=48, beta=0.4).vectors for one in (first, other))
    np.testing.assert_array_equal(a[order], b)


def test_a_share_of_the_rows_is_the_same():
    """Three ranks, each with its rows, that put their blocks together after each power."""
    graph, cuts = random_graph(500, 3000, heavy=True), [0, 100, 333, 500]
    meet, blocks, vectors = threading.Barrier(3), [None] * 3, [None] * 3

    def rank(r):
        def gather(block):
            blocks[r] = block
            meet.wait(20)
            whole = np.concatenate(blocks)
            meet.wait(20)
            return whole

        share = slice(cuts[r], cuts[r + 1])
        vectors[r] = FastRPModel(graph, dim=32, beta=-0.5, rows=share, gather=gather).vectors

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    whole = FastRPModel(graph, dim=32, beta=-0.5).vectors
    np.testing.assert_array_equal(np.concatenate(vectors), whole)


@pytest.mark.slow
def test_ranks_in_processes_of_their_own(tmp_path):
    pytest.importorskip("torch")
    from shoal.parallel.comm.processes import run_processes

    graph = random_graph(2000, 9000, heavy=True)
    graph.save(tmp_path / "graph")
    target = f"{Path(__file__).parent / 'fastrp_ranks.py'}:embed_rows"
    given = {"graph": str(tmp_path / "graph"), "into": str(tmp_path)}
    ranges = run_processes(target, 3, given)
    assert [one[0] for one in ranges] == [0, *(one[1] for one in ranges[:-1])]
    entries = [int(graph.indptr[end] - graph.indptr[begin]) for begin, end in ranges]
    assert sum(entries) == graph.nnz and max(entries) < 0.5 * graph.nnz
    blocks = [np.load(tmp_path / f"{rank}.npy") for rank in range(3)]
    whole = FastRPModel(graph, dim=48, beta=0.3).vectors
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize(("beta", "normalise"), [(0.0, True), (0.5, True), (0.5, False)])
def test_edges_that_are_added(beta, normalise):
    n = 400
    ring = np.arange(n - 2)  # two nodes are alone
    graph = CSRGraph.from_edges(ring, (ring + 1) % (n - 2), num_nodes=n)
    options = {"dim": 24, "weights": (0.0, 1.0, 3.0), "beta": beta, "normalise": normalise}
    model = FastRPModel(graph, keep=True, **options)
    before = model.vectors.copy()
    rows = model.update([10, 399, 20], [11, 50, 20])
    # Edge 10-11 is there already, 20-20 is a loop, and node 399 was alone. Rows within hops:
    hops = 3 if beta else 2
    near = {(one + step) % (n - 2) for one in (10, 11, 50, 20) for step in range(-hops, hops + 1)}
    assert set(rows.tolist()) <= near | {399} and 399 in rows and len(rows) < 40
    after = FastRPModel(graph.with_edges([399], [50]), **options).vectors
    np.testing.assert_array_equal(model.vectors, after)
    if normalise:
        others = np.setdiff1d(np.arange(n), rows)
        np.testing.assert_array_equal(before[others], after[others])
    assert model.graph.counts["self_loops"] == 1 and model.isolated.tolist() == [398]


def test_updates_in_a_row_equal_a_new_run():
    graph = random_graph(200, 300, heavy=True)
    draw = np.random.default_rng(8)
    model = FastRPModel(graph, dim=16, beta=-0.3, keep=True)
    whole = graph
    for _ in range(4):
        ends, weight = draw.integers(0, 200, (2, 3)), draw.uniform(1, 2, 3)
        model.update(*ends, weight)
        whole = whole.with_edges(*ends, weight)
    np.testing.assert_array_equal(
        model.vectors, FastRPModel(whole, dim=16, beta=-0.3, keep=True).vectors
    )


def communities(nodes=600, groups=6, seed=0):
    draw = np.random.default_rng(seed)
    group = draw.integers(0, groups, nodes)
    ends = draw.integers(0, nodes, (2, 60_000))
    near = (group[ends[0]] == group[ends[1]]) & (draw.random(60_000) < 0.3)
    far = draw.random(60_000) < 0.01
    ends = ends[:, near | far]
    labels = NodeLabels.of([[f"group {one}"] for one in group])
    return CSRGraph.from_edges(*ends, num_nodes=nodes, labels=labels)


def test_communities_are_told_apart_and_options_tuned():
    graph = communities()
    result = embed(graph, "fastrp", dim=64, weights="tune", beta="tune", tuning_share=0.1)
    tried = result.details["tried"]
    assert 10 < len(tried) <= 20
    assert len({(tuple(one["weights"]), one["beta"]) for one in tried}) == len(tried)
    best = max(tried, key=lambda one: one["micro_f1"])
    assert result.details["beta"] == best["beta"] and result.details["weights"] == best["weights"]
    same = embed(graph, "fastrp", dim=64, weights=best["weights"], beta=best["beta"])
    np.testing.assert_array_equal(result.vectors, same.vectors)
    nodes = divided(graph.labels, train_share=0.1, tuning_share=0.1, most=0, seed=0)
    assert not set(nodes.train) & set(nodes.test) and set(nodes.tuning) <= set(nodes.train)
    scores = judged_f1(result.vectors, graph.labels, nodes)
    assert min(scores) > 0.9
    noise = np.random.default_rng(0).standard_normal((600, 64))
    assert max(judged_f1(noise, graph.labels, nodes)) < 0.4


def test_trials_take_powers_that_are_mixed_again():
    graph = communities(200)
    options = {"weights": (1.0, 2.0, 3.0), "beta": 0.25, "dim": 20}
    rows = np.array([3, 50, 199])
    powers = FastRPModel(graph, **options).sample(rows)
    mixed = np.tensordot([1.0, 2.0, 3.0], powers, axes=1)
    np.testing.assert_allclose(mixed, FastRPModel(graph, **options).vectors[rows], atol=1e-5)


def test_left_out_scores_are_those_of_fits_without_the_node():
    draw = np.random.default_rng(0)
    x, labels = draw.standard_normal((30, 5)), NodeLabels.of([[str(i % 3)] for i in range(30)])
    x[:, 0] += np.arange(30) % 3
    z = (x - x.mean(0)) / x.std(0)
    truth = labels.dense()
    best = 0.0
    for ridge in (0.1, 1.0, 10.0):
        right = 0
        for i in range(30):
            rest = np.arange(30) != i
            K = z[rest] @ z[rest].T + 1
            w = np.linalg.solve(K + ridge * 5 * np.eye(29), 2.0 * truth[rest] - 1)
            right += truth[i, ((z[rest] @ z[i] + 1) @ w).argmax()]
        best = max(best, right / 30)
    assert left_out_f1(x, labels) == pytest.approx(best)


def test_several_labels_each():
    graph = communities()
    rows = graph.labels.indices
    several = NodeLabels.of([[f"a{one}", f"b{one % 2}"] for one in rows])
    vectors = embed(graph, dim=64).vectors
    nodes = divided(several, train_share=0.2, tuning_share=0.1, most=300, seed=0)
    assert len(nodes.train) + len(nodes.test) == 300
    assert min(judged_f1(vectors, several, nodes)) > 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [0, 0]}, r"fastrp\.weights = \(0.0, 0.0\)"),
        ({"weights": []}, r"fastrp\.weights"),
        ({"weights": [1, math.nan]}, r"fastrp\.weights"),
        ({"weights": [1, math.inf]}, r"fastrp\.weights"),
        ({"q": 3}, r"fastrp\.q = 3: expected 4"),
        ({"beta": math.nan}, r"fastrp\.beta = nan"),
        ({"s": 0.5}, r"fastrp\.s"),
        ({"s": math.inf}, r"fastrp\.s"),
        ({"dim": 0}, r"fastrp\.dim"),
        ({"trials": 21}, r"fastrp\.trials"),
        ({"beta": "tuned"}, r"fastrp\.beta"),
        ({"colour": 1}, "no such key"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        embed(random_graph(20, 30), "fastrp", **options)


def test_graphs_that_cannot_be():
    graph = CSRGraph.from_edges([0, 1, 2], [1, 2, 3], [1, -2, 1])
    with pytest.raises(EmbeddingError, match=r"negative weights.*beta = 0.5"):
        embed(graph, beta=0.5)
    assert np.isfinite(embed(graph, beta=1.0).vectors).all()
    with pytest.raises(EmbeddingError, match="node 1 add up to 0"):
        embed(CSRGraph.from_edges([0, 1], [1, 2], [2, -2]))
    for beta in (50.0, -50.0):
        with pytest.raises(EmbeddingError, match=f"beta = {beta}"):
            embed(random_graph(60, 200), beta=beta)
    for wrong in ({"threads": 0}, {"tuning_share": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            embed(random_graph(20, 30), **wrong)
    with pytest.raises(EmbeddingError, match="no labels"):
        embed(random_graph(20, 30), beta="tune")
    with pytest.raises(ConfigError, match="method"):
        table("node_embedder").build("fastpr", where="method")
    model = FastRPModel(random_graph(20, 30), beta=0.5)
    with pytest.raises(EmbeddingError, match="keep=True"):
        model.update([1], [2])
    kept = FastRPModel(CSRGraph.from_edges([0, 1], [1, 2], [1, 1]), beta=0.5, keep=True)
    before = kept.vectors.copy()
    with pytest.raises(EmbeddingError, match="negative"):
        kept.update([0], [2], [-3])
    np.testing.assert_array_equal(kept.vectors, before)
    kept.update([0], [2], [1])
    assert kept.graph.nnz == 6
    empty = embed(CSRGraph.from_edges([0, 0], [0, 0], num_nodes=3), dim=8)
    assert not empty.vectors.any() and empty.isolated.tolist() == [0, 1, 2]


def test_root_of_the_nodes():
    graph = random_graph(400, 900)
    model = FastRPModel(graph, s="sqrt", dim=64)
    assert model.s == 20.0 and np.isfinite(model.vectors).all()


def test_walks_go_along_edges():
    pytest.importorskip("gensim")
    graph = random_graph(60, 120, heavy=True)
    part = table("node_embedder").build({"name": "deepwalk", "dim": 16, "length": 9, "epochs": 1})
    linked = np.flatnonzero(np.diff(graph.indptr))
    pairs = set(zip(*(one.tolist() for one in graph.edges()), strict=True))
    steps = np.zeros((60, 60))
    for walks in part.paths(graph, 0):
        assert sorted(walks[:, 0]) == linked.tolist()
        for a, b in zip(walks[:, :-1].ravel(), walks[:, 1:].ravel(), strict=True):
            assert (a, b) in pairs
            steps[a, b] += 1
    hub = graph.weight[graph.indptr[1] : graph.indptr[2]]
    gone = steps[1, graph.indices[graph.indptr[1] : graph.indptr[2]]]
    assert np.corrcoef(hub, gone)[0, 1] > 0.3
    result = part.fit(graph, seed=0)
    assert np.isfinite(result.vectors).all() and result.isolated.tolist() == [
        one for one in range(60) if one not in set(linked.tolist())
    ]
    assert not result.vectors[result.isolated].any() and result.vectors[linked].any(axis=1).all()
    with pytest.raises(EmbeddingError, match="negative"):
        part.fit(CSRGraph.from_edges([0, 1], [1, 2], [1, -2]), seed=0)


def test_deepwalk_tells_communities_apart():
    pytest.importorskip("gensim")
    graph = communities(200, 4)
    result = embed(graph, "deepwalk", dim=16, length=20)
    nodes = divided(graph.labels, train_share=0.3, tuning_share=0.1, most=0, seed=0)
    assert judged_f1(result.vectors, graph.labels, nodes).micro > 0.9


def test_deepwalk_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gensim.models.word2vec", None)
    with pytest.raises(MissingExtraError, match="gensim"):
        embed(random_graph(20, 30), "deepwalk")
