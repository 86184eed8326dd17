"""GraphVite beside a loop over the pairs, and what its draws and blocks must be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from shoal.core.errors import ConfigError
from shoal.fields.graph import CSRGraph, embed, read_graph
from shoal.fields.graph.embedding.graphvite.native import (
    AliasTable,
    draw_negatives,
    train_block,
    walk_pairs,
)
from shoal.fields.graph.embedding.graphvite.part import (
    GraphVite,
    balanced_parts,
    routed,
    shuffled,
)
from shoal.fields.graph.embedding.judging import divided, judged_f1
from shoal.fields.graph.embedding.protocols import EmbeddingError


def small(heavy=False):
    draw = np.random.default_rng(0)
    weight = draw.uniform(0.5, 4, 60).astype(np.float32) if heavy else None
    ring = np.arange(12)
    ends = np.concatenate([[ring, (ring + 1) % 12], draw.integers(0, 12, (2, 48))], axis=1)
    return CSRGraph.from_edges(*ends, weight, num_nodes=12)


@pytest.mark.parametrize("dim", [5, 128])
def test_training_is_that_of_a_loop(dim):
    draw = np.random.default_rng(0)
    vertex, context = draw.standard_normal((2, 20, dim)).astype(np.float32) * 0.3
    pairs = draw.integers(0, 20, (400, 2)).astype(np.int32)
    negatives = draw.integers(0, 20, 400).astype(np.int32)
    assert (pairs[:, 1] == negatives).any()
    u, c = vertex.astype(np.float64), context.astype(np.float64)
    for k, ((head, tail), other) in enumerate(zip(pairs, negatives, strict=True)):
        step = 0.05 + (0.01 - 0.05) * k / 400
        a, b, n = u[head].copy(), c[tail].copy(), c[other].copy()
        near = 1 / (1 + np.exp(a @ b))
        far = -5 / (1 + np.exp(-(a @ n)))
        u[head] = (1 - step * 0.005) * a + step * (near * b + far * n)
        if tail == other:
            c[tail] = (1 - step * 0.005) * b + step * (near + far) * a
        else:
            c[tail] = (1 - step * 0.005) * b + step * near * a
            c[other] = (1 - step * 0.005) * n + step * far * a
    train_block(pairs, negatives, vertex, context, rate=(0.05, 0.01), weight=5.0, decay=0.005)
    np.testing.assert_allclose(vertex, u, atol=1e-5)
    np.testing.assert_allclose(context, c, atol=1e-5)


def test_blocks_without_common_rows_may_be_trained_in_any_order():
    graph = small()
    of = balanced_parts(graph.degrees(), 2)
    starts = AliasTable.of(graph.degrees())
    pairs = walk_pairs(graph, None, starts, range(200), 10, 3, 7)
    blocks = routed(pairs, of, 2)
    assert sum(map(len, blocks)) == len(pairs)
    tables = []
    for order in ((1, 2), (2, 1)):
        vertex, context = np.random.default_rng(2).standard_normal((2, 12, 16)).astype(np.float32)
        for at in order:
            assert (of[blocks[at][:, 0]] == at // 2).all() and (
                of[blocks[at][:, 1]] == at % 2
            ).all()
            members = np.flatnonzero(of == at % 2).astype(np.int32)
            table = AliasTable.of(graph.degrees()[members])
            negatives = draw_negatives(members, table, len(blocks[at]), at)
            train_block(
                blocks[at], negatives, vertex, context, rate=(0.1, 0.1), weight=5.0, decay=0.0
            )
        tables.append(np.stack([vertex, context]))
    np.testing.assert_array_equal(*tables)


def test_negatives_are_drawn_by_degree_within_their_part():
    graph = small()
    weight = graph.degrees() ** 0.75
    of = balanced_parts(graph.degrees(), 3)
    for part in range(3):
        members = np.flatnonzero(of == part).astype(np.int32)
        draws = draw_negatives(members, AliasTable.of(weight[members]), 50_000, part)
        counts = np.bincount(draws, minlength=12)
        assert not counts[of != part].any()
        wanted = 50_000 * weight[members] / weight[members].sum()
        assert stats.chisquare(counts[members], wanted).pvalue > 1e-4


@pytest.mark.parametrize("heavy", [False, True])
def test_pairs_follow_the_powers_of_the_transitions(heavy):
    graph = small(heavy)
    A = np.zeros((12, 12))
    A[graph.edges()] = 1 if graph.weight is None else graph.weight
    degrees = A.sum(1)
    ends = None
    if heavy:
        ends = np.concatenate([[0.0], np.cumsum(graph.weight, dtype=np.float64)])
    starts = AliasTable.of(graph.degrees())
    walks, length, reach = 20_000, 6, 2
    pairs = walk_pairs(graph, ends, starts, range(walks), length, reach, 3)
    assert len(pairs) == walks * (5 + 4)
    np.testing.assert_array_equal(
        pairs[9 * 100 : 9 * 200], walk_pairs(graph, ends, starts, range(100, 200), length, reach, 3)
    )
    P = A / degrees[:, None]
    first = pairs.reshape(walks, 9, 2)[:, 0]  # of each walk one, so that they are independent
    second = pairs.reshape(walks, 9, 2)[:, 1]
    for some, power in ((first, P), (second, P @ P)):
        wanted = walks * (degrees / degrees.sum())[:, None] * power
        counts = np.zeros((12, 12))
        np.add.at(counts, tuple(some.T), 1)
        there = wanted > 0
        assert not counts[~there].any()
        assert stats.chisquare(counts[there], wanted[there]).pvalue > 1e-4


@pytest.mark.parametrize(("count", "lanes"), [(20, 4), (23, 4), (3, 5), (0, 2), (12, 1)])
def test_the_pseudo_shuffle_is_a_permutation(count, lanes):
    pairs = np.stack([np.arange(count), np.arange(count)], axis=1).astype(np.int32)
    mixed = shuffled(pairs, lanes)
    assert sorted(mixed[:, 0]) == list(range(count))
    whole = count // lanes * lanes
    for k in range(whole):
        assert mixed[(k % lanes) * (whole // lanes) + k // lanes, 0] == k


def test_partitions_have_like_sums_of_degrees():
    degrees = np.random.default_rng(0).zipf(1.8, 10_000).clip(max=500)
    of = balanced_parts(degrees, 4)
    sums = np.bincount(of, degrees)
    assert sums.max() / sums.min() < 1.03 and np.ptp(np.bincount(of)) <= 1


def test_communities_on_any_number_of_threads():
    graph = read_graph("planted:600")
    options = {"epochs": 150, "dim": 32, "episode": 50_000, "partitions": 3}
    one, three = (embed(graph, "graphvite", threads=n, **options) for n in (1, 3))
    np.testing.assert_array_equal(one.vectors, three.vectors)
    assert one.details["pairs"] >= 150 * graph.nnz // 2
    # Each round of each of the pools moves all vertex rows.
    assert one.details["moved_bytes"] % (3 * one.vectors.nbytes) == 0
    nodes = divided(graph.labels, train_share=0.2, tuning_share=0.1, most=0, seed=0)
    assert judged_f1(one.vectors, graph.labels, nodes).micro > 0.9


def test_isolated_nodes_stay_where_they_began():
    graph = CSRGraph.from_edges([0, 1], [1, 2], num_nodes=5)
    result = embed(graph, "graphvite", dim=8, epochs=10)
    assert result.isolated.tolist() == [3, 4]
    assert 0 < np.abs(result.vectors[3:]).max() <= 0.5 / 8
    empty = embed(CSRGraph.from_edges([0], [0], num_nodes=3), "graphvite", dim=8)
    assert empty.isolated.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"episode": 1001}, "episode = 1001: expected a multiple of shuffle = 5"),
        ({"length": 5, "reach": 5}, "reach = 5: expected less than length = 5"),
        ({"partitions": 1, "threads": 2}, "partitions = 1: expected 2, as many as"),
        ({"partitions": 13}, "partitions = 13: expected 1, as many as"),
        ({"dim": 0}, "dim"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        embed(small(), "graphvite", **options)


def test_graphs_that_cannot_be():
    with pytest.raises(EmbeddingError, match="directed"):
        GraphVite().fit(CSRGraph.from_edges([0], [1], directed=True), seed=0)
    with pytest.raises(EmbeddingError, match="negative"):
        GraphVite().fit(CSRGraph.from_edges([0], [1], [-1]), seed=0)
