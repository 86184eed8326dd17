"""Undirected graphs of nodes, and what their Laplacians say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.fields.federate.protocols import FederationError


@dataclass(frozen=True)
class NodeGraph:
    """A connected graph without loops.

    Args:
        nodes: how many, n.
        edges: pairs (i, j) with i < j, in order.
    """

    nodes: int
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, in order."""
        found: list[list[int]] = [[] for _ in range(self.nodes)]
        for i, j in self.edges:
            found[i].append(j)
            found[j].append(i)
        return tuple(tuple(sorted(one)) for one in found)

    def laplacian(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum of w_e (e_i - e_j)(e_i - e_j)^T, float64 [n, n].

        Args:
            weights: of the edges, [E]; 1 each if not given.
        """
        result = np.zeros((self.nodes, self.nodes))
        for (i, j), weight in zip(
            self.edges, np.ones(len(self.edges)) if weights is None else weights, strict=True
        ):
            result[i, i] += weight
            result[j, j] += weight
            result[i, j] -= weight
            result[j, i] -= weight
        return result


def graph_of(nodes: int, pairs: Iterable[tuple[int, int]], where: str = "topology") -> NodeGraph:
    """A graph from pairs of node numbers, each edge counted once.

    Args:
        nodes: how many.
        pairs: in any order and direction.
        where: what is wrong with them is said of this.

    Raises:
        FederationError: a loop, a node that does not exist, or several components.
    """
    edges = set()
    for i, j in pairs:
        if i == j:
            raise FederationError(f"{where}: node {i} has an edge to itself; leave it out")
        if not (0 <= i < nodes and 0 <= j < nodes):
            raise FederationError(
                f"{where}: edge ({i}, {j}) names a node that is not there; nodes are 0 to "
                f"{nodes - 1}"
            )
        edges.add((min(i, j), max(i, j)))
    graph = NodeGraph(nodes, tuple(sorted(edges)))
    reached, front = {0}, [0]
    while front:
        new = [one for one in graph.neighbours[front.pop()] if one not in reached]
        reached.update(new)
        front += new
    if len(reached) < nodes:
        missing = next(one for one in range(nodes) if one not in reached)
        raise FederationError(
            f"{where}: not connected: no path leads from node 0 to node {missing} "
            f"({len(reached)} of {nodes} nodes are reached); add edges"
        )
    return graph
