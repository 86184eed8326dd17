"""Rates of edges: constants against their definitions, optimal rates against uniform ones."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.parts import table
from shoal.fields.federate.gossip.graphs import NodeGraph, graph_of
from shoal.fields.federate.gossip.rates import constants, feasible, optimal_rates, uniform_rates
from shoal.fields.federate.protocols import FederationError


def _graph(name: str, nodes: int) -> NodeGraph:
    graph: NodeGraph = table("topology").build(name).graph(nodes, 0)
    return graph


def test_constants_of_a_cycle() -> None:
    # Eigenvalues 2 - 2 cos(2 pi k / n); a resistance of 1 beside one of n - 1.
    found = constants(_graph("cycle", 10), np.ones(10))
    assert found.chi1 == pytest.approx(1 / (2 - 2 * np.cos(2 * np.pi / 10)))
    assert found.chi2 == pytest.approx(0.9 / 2)


@pytest.mark.parametrize("name", ["cycle", "path", "barbell", "grid", "barabasi_albert"])
def test_rates_are_scaled_to_one_half(name: str) -> None:
    graph = _graph(name, 10)
    drawn = np.random.default_rng(0).uniform(0.1, 1, len(graph.edges))
    found = feasible(graph, drawn)
    again = constants(graph, found.rates)
    assert again.chi1 * again.chi2 == pytest.approx(0.5)
    assert again.chi1 <= 1 / np.linalg.eigvalsh(graph.laplacian(found.rates))[1] + 1e-9


@pytest.mark.parametrize("name", ["barbell", "grid", "barabasi_albert", "small_world"])
def test_optimal_rates(name: str) -> None:
    pytest.importorskip("clarabel")
    graph = _graph(name, 10)
    best, even = optimal_rates(graph), uniform_rates(graph)
    assert best.total <= even.total
    again = constants(graph, best.rates)
    assert again.chi1 * again.chi2 <= 0.5 + 1e-6
    # No rates near them do better: the problem is convex, so that is the optimum.
    draw = np.random.default_rng(1)
    for _ in range(200):
        other = best.rates * np.exp(0.05 * draw.standard_normal(len(best.rates)))
        assert feasible(graph, other).total >= best.total * (1 - 1e-5)


@pytest.mark.parametrize("name", ["cycle", "complete", "star"])
def test_where_all_edges_are_alike_uniform_is_optimal(name: str) -> None:
    pytest.importorskip("clarabel")
    graph = _graph(name, 8)
    assert np.array_equal(optimal_rates(graph).rates, uniform_rates(graph).rates)


def test_rates_that_do_not_connect() -> None:
    graph = graph_of(4, [(0, 1), (1, 2), (2, 3)])
    with pytest.raises(FederationError, match="do not connect"):
        constants(graph, np.array([1.0, 0.0, 1.0]))
