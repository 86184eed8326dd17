"""Topologies: edges, degrees, and graphs that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from shoal.core.parts import table
from shoal.fields.federate.gossip.graphs import NodeGraph, graph_of
from shoal.fields.federate.protocols import FederationError


def _graph(choice: object, nodes: int, seed: int = 0) -> NodeGraph:
    graph: NodeGraph = table("topology").build(choice).graph(nodes, seed)  # type: ignore[arg-type]
    return graph


@pytest.mark.parametrize(
    ("choice", "nodes", "oracle"),
    [
        ("cycle", 7, nx.cycle_graph(7)),
        ("path", 5, nx.path_graph(5)),
        ("star", 6, nx.star_graph(5)),
        ("complete", 5, nx.complete_graph(5)),
        ({"name": "ring_k", "k": 4}, 9, nx.circulant_graph(9, [1, 2])),
        ("grid", 12, nx.grid_2d_graph(3, 4)),
        ("barbell", 10, nx.barbell_graph(5, 0)),
    ],
)
def test_fixed_graphs_are_those_of_networkx(
    choice: object, nodes: int, oracle: nx.Graph[object]
) -> None:
    graph = _graph(choice, nodes)
    assert nx.is_isomorphic(nx.Graph(graph.edges), oracle)


@pytest.mark.parametrize(
    ("choice", "edges"),
    [
        ({"name": "k_regular", "k": 3}, 15),
        ({"name": "barabasi_albert", "m": 2}, 16),
        ({"name": "small_world", "k": 4, "p": 0.3}, 20),
    ],
)
def test_random_graphs_follow_the_seed(choice: object, edges: int) -> None:
    graphs = [_graph(choice, 10, seed) for seed in (0, 0, 1, 2)]
    assert all(len(graph.edges) == edges for graph in graphs)
    assert graphs[0] == graphs[1]
    assert len({graph.edges for graph in graphs}) > 1


def test_laplacian() -> None:
    graph = _graph("grid", 6)
    oracle = nx.laplacian_matrix(nx.Graph(graph.edges), nodelist=range(6)).toarray()
    assert np.array_equal(graph.laplacian(), oracle)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(0, 1), (2, 3)], "not connected: no path leads from node 0 to node 2"),
        ([(0, 1), (1, 1)], "edge to itself"),
        ([(0, 1), (1, 7)], "names a node that is not there"),
    ],
)
def test_graphs_that_cannot_be(pairs: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        graph_of(4, pairs)


def test_edge_list(tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps([[0, 1], [2, 1]]))
    assert _graph({"name": "edge_list", "file": str(file)}, 3).edges == ((0, 1), (1, 2))
    with pytest.raises(FederationError, match="not connected"):
        _graph({"name": "edge_list", "file": str(file)}, 4)
    file.write_text('{"a": 1}')
    with pytest.raises(FederationError, match="list of pairs"):
        _graph({"name": "edge_list", "file": str(file)}, 3)


@pytest.mark.parametrize(
    ("choice", "nodes", "said"),
    [
        ("cycle", 2, "at least 3"),
        ({"name": "ring_k", "k": 3}, 8, "even"),
        ({"name": "k_regular", "k": 3}, 5, "half an edge"),
        ({"name": "k_regular", "k": 1}, 6, "not connected"),
    ],
)
def test_topologies_that_do_not_fit(choice: object, nodes: int, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        _graph(choice, nodes)
