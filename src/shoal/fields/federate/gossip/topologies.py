"""Graphs that nodes may form; random ones are drawn until they are connected."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from annotated_types import Ge, Le

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import seed64
from shoal.fields.federate.gossip.graphs import NodeGraph, graph_of
from shoal.fields.federate.protocols import FederationError

# Graphs that are drawn before a topology is given up.
_DRAWS = 100


def _least(nodes: int, least: int, name: str) -> None:
    if nodes < least:
        raise FederationError(
            f"topology: {name} of {nodes} nodes; it needs at least {least}: take more nodes"
        )


@part
class Cycle:
    """A ring: every node has two neighbours."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N edges."""
        _least(nodes, 3, "a cycle")
        return graph_of(nodes, ((i, (i + 1) % nodes) for i in range(nodes)))


@part
class PathTopology:
    """A line: the ends have one neighbour."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N - 1 edges."""
        _least(nodes, 2, "a path")
        return graph_of(nodes, ((i, i + 1) for i in range(nodes - 1)))


@part
class StarTopology:
    """Node 0 is everyone's neighbour; there are no other edges."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N - 1 edges."""
        _least(nodes, 2, "a star")
        return graph_of(nodes, ((0, i) for i in range(1, nodes)))


@part
class Complete:
    """Everyone is everyone's neighbour."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N (n - 1) / 2 edges."""
        _least(nodes, 2, "a complete graph")
        return graph_of(nodes, ((i, j) for i in range(nodes) for j in range(i)))


@part
class RingK:
    """A ring on which every node knows the nearest ones on both sides.

    Args:
        k: neighbours of a node; even.
    """

    k: Annotated[int, Ge(2)] = 4

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N k / 2 edges."""
        if self.k % 2:
            raise FederationError(f"topology: ring_k with k = {self.k}; take an even number")
        _least(nodes, self.k + 1, f"ring_k with k = {self.k}")
        steps = range(1, self.k // 2 + 1)
        return graph_of(nodes, ((i, (i + step) % nodes) for i in range(nodes) for step in steps))


@part
class GridTopology:
    """A rectangle, as near to a square as the number of nodes allows; no edges around it."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """Of w x h nodes, 2 w h - w - h edges."""
        _least(nodes, 2, "a grid")
        wide = next(w for w in range(int(nodes**0.5), 0, -1) if nodes % w == 0)
        beside = ((i, i + 1) for i in range(nodes) if (i + 1) % wide)
        below = ((i, i + wide) for i in range(nodes - wide))
        return graph_of(nodes, (*beside, *below))


@part
class Barbell:
    """Two complete halves and one edge between them."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """The edge joins the last node of the first half with the first one of the second."""
        _least(nodes, 4, "a barbell")
        half = nodes // 2
        first = ((i, j) for i in range(half) for j in range(i))
        second = ((i, j) for i in range(half, nodes) for j in range(half, i))
        return graph_of(nodes, (*first, *second, (half - 1, half)))


@part
class KRegular:
    """Every node has as many neighbours, chosen at random.

    Args:
        k: neighbours of a node.
    """

    k: Annotated[int, Ge(1)] = 4

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N k / 2 edges."""
        _least(nodes, self.k + 1, f"k_regular with k = {self.k}")
        if nodes * self.k % 2:
            raise FederationError(
                f"topology: k_regular with k = {self.k} of {nodes} nodes has half an edge; let one "
                "of the numbers be even"
            )
        networkx = _networkx()
        return _drawn(
            nodes, seed, lambda s: networkx.random_regular_graph(self.k, nodes, seed=s).edges
        )


@part
class BarabasiAlbert:
    """Nodes arrive one by one and choose neighbours that have many already.

    Source: Barabási and Albert, Emergence of Scaling in Random Networks, 1999.

    Args:
        m: neighbours that a new node chooses.
    """

    m: Annotated[int, Ge(1)] = 2

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """M (n - m) edges."""
        _least(nodes, self.m + 1, f"barabasi_albert with m = {self.m}")
        networkx = _networkx()
        return _drawn(
            nodes, seed, lambda s: networkx.barabasi_albert_graph(nodes, self.m, seed=s).edges
        )


@part
class SmallWorld:
    """A ring of near neighbours, some of whose edges lead anywhere.

    Source: Watts and Strogatz, Collective Dynamics of Small-World Networks, 1998.

    Args:
        k: neighbours of a node on the ring.
        p: share of edges that are moved.
    """

    k: Annotated[int, Ge(2)] = 4
    p: Annotated[float, Ge(0), Le(1)] = 0.2

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """N (k // 2) edges."""
        _least(nodes, self.k + 1, f"small_world with k = {self.k}")
        networkx = _networkx()
        return _drawn(
            nodes,
            seed,
            lambda s: networkx.watts_strogatz_graph(nodes, self.k, self.p, seed=s).edges,
        )


@part
class EdgeList:
    """Edges from a file of JSON: a list of pairs of node numbers.

    Args:
        file: such as ``graph.json`` with ``[[0, 1], [1, 2]]``.
    """

    file: str

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """As many edges as the file has."""
        where = f"topology: {self.file}"
        try:
            pairs = json.loads(pathlib.Path(self.file).expanduser().read_text())
        except (OSError, ValueError) as cause:
            raise FederationError(f"{where}: cannot be read as JSON ({cause})") from cause
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise FederationError(f"{where}: expected a list of pairs of numbers, as [[0, 1], ...]")
        return graph_of(nodes, map(tuple, pairs), where)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)


def _networkx() -> Any:
    return import_extra("networkx", extra="run", purpose="random graphs")


def _drawn(nodes: int, seed: int, draw: Callable[[int], Iterable[tuple[int, int]]]) -> NodeGraph:
    """The first connected graph of several draws.

    Raises:
        FederationError: none of them is connected.
    """
    for attempt in range(_DRAWS):
        pairs = draw(seed64(seed, purpose="edges of a graph", step=attempt) % 2**32)
        try:
            return graph_of(nodes, pairs)
        except FederationError as cause:
            failed = cause
    raise FederationError(f"{failed}; or take another seed")
