"""Replicas that are made equal after every batch learn what one table learns, and count bytes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal.claims.lab.synchronous_sgns import synchronous_sgns
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.embedding.graphvite.part import GraphVite

_PART = GraphVite(dim=16, length=10, reach=2, epochs=100, episode=20_000, rate=0.1)


def two_halves() -> tuple[CSRGraph, np.ndarray]:
    """A graph of two halves with few edges between them, and the half of each node."""
    draw = np.random.default_rng(0)
    half = np.arange(200) % 2
    a = draw.integers(0, 200, 3000)
    b = np.where(draw.random(3000) < 0.95, a ^ (draw.integers(0, 100, 3000) * 2), a ^ 1) % 200
    return CSRGraph.from_edges(a, b, num_nodes=200).largest_component(), half


def apart(vectors: np.ndarray, half: np.ndarray) -> float:
    """Share of nodes whose nearest other node is of their half."""
    rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = rows @ rows.T - 2 * np.eye(len(rows))
    return float((half[near.argmax(axis=1)] == half).mean())


def test_replicas_learn_and_every_touched_row_is_counted():
    graph, half = two_halves()
    assert graph.num_nodes == 200
    pairs = _PART.epochs * graph.nnz // 2
    blocks = _PART.fit(graph, seed=1, threads=2)
    vectors, sent = synchronous_sgns(graph, _PART, pairs=pairs, batch=2000, world=2, seed=1)
    assert apart(blocks.vectors, half) > 0.8
    assert apart(vectors, half) > 0.8
    # All rows are touched in a batch: both tables, and a mask of each, twice around two ranks.
    rounds = -(-pairs // 4000)
    whole = 2 * 2 * graph.num_nodes * (4 * _PART.dim + 1)
    assert 0.9 * rounds * whole <= sent <= rounds * whole
    # In 13 pools the vectors of all nodes move twice.
    pools = -(-pairs // _PART.episode)
    assert blocks.details["moved_bytes"] == pytest.approx(pools * 2 * 4 * 200 * _PART.dim, rel=0.1)


def test_one_rank_sends_nothing():
    graph, _ = two_halves()
    _, sent = synchronous_sgns(graph, _PART, pairs=4000, batch=2000, world=1, seed=1)
    assert sent == 0
