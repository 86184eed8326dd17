"""Nodes by rank and chunk, and which rows go from whom to whom.

Sets of nodes are METIS' (Karypis and Kumar, A Fast and High Quality Multilevel Scheme for
Partitioning Irregular Graphs, 1998), balanced by the work of their nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from shoal.core.extras import import_extra
from shoal.fields.graph.deep.protocols import DeepGnnError, RankGrid
from shoal.fields.graph.graph import CSRGraph

# A node's work beyond that of its neighbours, in neighbours.
_OWN_WORK = 8


def normalised(graph: CSRGraph) -> csr_matrix:
    """``D^-1/2 (A + I) D^-1/2`` of a graph without weights, float32 [N, N].

    Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks,
    2017.
    """
    nodes = np.arange(graph.num_nodes)
    source, target = graph.edges()
    other = source != target  # every node has itself once
    rows, columns = (np.concatenate([one[other], nodes]) for one in (source, target))
    scale = 1 / np.sqrt(np.bincount(rows, minlength=graph.num_nodes).astype(np.float64))
    values = (scale[rows] * scale[columns]).astype(np.float32)
    return csr_matrix((values, (rows, columns)), (graph.num_nodes, graph.num_nodes))


def divided_nodes(graph: CSRGraph, parts: int) -> np.ndarray:
    """The set of each node, int64 [N], of sets with about equal work and few edges between them.

    Args:
        graph: undirected.
        parts: sets, none of which is empty.

    Raises:
        DeepGnnError: there are fewer nodes than sets.
    """
    if graph.num_nodes < parts:
        raise DeepGnnError(f"{graph.num_nodes} nodes for {parts} sets; expected at least as many")
    if parts == 1:
        return np.zeros(graph.num_nodes, np.int64)
    metis: Any = import_extra("pymetis", extra="graph", purpose="dividing the nodes of a graph")
    adjacency = metis.CSRAdjacency(
        graph.indptr.astype(np.int64), np.ascontiguousarray(graph.indices, np.int64)
    )
    work = np.diff(graph.indptr).astype(np.int64) + _OWN_WORK
    _, of = metis.part_graph(parts, adjacency, vweights=work)
    of = np.asarray(of, np.int64)
    for empty in np.flatnonzero(np.bincount(of, minlength=parts) == 0):
        of[np.flatnonzero(of == np.bincount(of, minlength=parts).argmax())[0]] = empty
    return of


@dataclass(frozen=True)
class NodeDivision:
    """The part and the chunk of each node.

    Args:
        part: int64 [N].
        chunk: int64 [N].
    """

    part: np.ndarray
    chunk: np.ndarray

    @classmethod
    def of(cls, graph: CSRGraph, grid: RankGrid) -> NodeDivision:
        """Divide nodes among parts, and those of each part among chunks.

        Raises:
            DeepGnnError: there are fewer nodes than ranks and chunks want.
        """
        part, chunk = divided_nodes(graph, grid.parts), np.zeros(graph.num_nodes, np.int64)
        for one in range(grid.parts):
            own = np.flatnonzero(part == one)
            chunk[own] = divided_nodes(induced(graph, own), grid.chunks)
        return cls(part, chunk)

    def replicas(self, graph: CSRGraph) -> int:
        """Rows that parts hold of each other's nodes, summed over the parts."""
        source, target = graph.edges()
        far = self.part[source] != self.part[target]
        parts = int(self.part.max()) + 1
        return len(np.unique(target[far].astype(np.int64) * parts + self.part[source[far]]))


def induced(graph: CSRGraph, nodes: np.ndarray) -> CSRGraph:
    """The edges among some nodes, which are numbered anew in their order."""
    number = np.full(graph.num_nodes, -1)
    number[nodes] = np.arange(len(nodes))
    source, target = (number[one] for one in graph.edges())
    inside = (source >= 0) & (target >= 0)
    return CSRGraph.from_edges(source[inside], target[inside], num_nodes=len(nodes))


@dataclass(frozen=True)
class RowChunk:
    """The rows of a chunk that a rank has, and what it exchanges with its peers for them.

    Args:
        rows: where they lie among the rank's rows.
        matrix: rows of the normalised adjacency matrix, [n, rows of the rank and of others].
        give: by peer, own rows that it needs.
        take: by peer, where its rows are put.
    """

    rows: slice
    matrix: csr_matrix
    give: tuple[np.ndarray, ...]
    take: tuple[slice, ...]

    @property
    def n(self) -> int:
        """How many rows."""
        return int(self.rows.stop - self.rows.start)

    @cached_property
    def entries(self) -> int:
        """Entries of its rows."""
        return int(self.matrix.nnz)


@dataclass(frozen=True)
class LocalRows:
    """The rows of a part: its own by chunk, then those of other parts by chunk and part.

    Args:
        own: int64, its nodes in the order of their rows.
        total: its rows and those of others that it needs.
        chunks: in their order.
    """

    own: np.ndarray
    total: int
    chunks: tuple[RowChunk, ...]

    @classmethod
    def of(cls, matrix: csr_matrix, division: NodeDivision, part: int, grid: RankGrid) -> LocalRows:
        """The rows of one part.

        Args:
            matrix: the whole, symmetric adjacency matrix.
            division: of its nodes.
            part: whose rows.
            grid: of the ranks.
        """
        own = _ordered(np.flatnonzero(division.part == part), division.chunk)
        mine = matrix[own]
        touched = np.unique(mine.indices)
        outside = touched[division.part[touched] != part]
        # By chunk, then by part, then by number: as their owners send them.
        outside = outside[np.lexsort((outside, division.part[outside], division.chunk[outside]))]
        place = np.full(matrix.shape[0], -1)
        place[own] = np.arange(len(own))
        place[outside] = len(own) + np.arange(len(outside))
        total = len(own) + len(outside)
        local = csr_matrix((mine.data, place[mine.indices], mine.indptr), (len(own), total))
        edges = np.searchsorted(division.chunk[own], np.arange(grid.chunks + 1))
        keys = division.chunk[outside] * grid.parts + division.part[outside]
        cuts = len(own) + np.searchsorted(keys, np.arange(grid.chunks * grid.parts + 1))
        needs = [_needed(matrix, division, peer, part) for peer in range(grid.parts)]
        chunks = []
        for at in range(grid.chunks):
            rows = slice(int(edges[at]), int(edges[at + 1]))
            first = at * grid.parts
            chunks.append(
                RowChunk(
                    rows=rows,
                    matrix=local[rows],
                    give=tuple(place[need[division.chunk[need] == at]] for need in needs),
                    take=tuple(
                        slice(int(cuts[first + peer]), int(cuts[first + peer + 1]))
                        for peer in range(grid.parts)
                    ),
                )
            )
        return cls(own=own, total=total, chunks=tuple(chunks))

    def whole(self) -> RowChunk:
        """All own rows as one chunk, which exchanges nothing by itself."""
        from scipy.sparse import vstack

        matrix: Any = vstack([one.matrix for one in self.chunks], format="csr")
        return RowChunk(rows=slice(0, len(self.own)), matrix=matrix, give=(), take=())


def _ordered(nodes: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    return nodes[np.lexsort((nodes, chunk[nodes]))]


def _needed(matrix: csr_matrix, division: NodeDivision, peer: int, part: int) -> np.ndarray:
    """Nodes of a part that a peer needs, in rising order."""
    if peer == part:
        return np.zeros(0, np.int64)
    touched = np.unique(matrix[np.flatnonzero(division.part == peer)].indices)
    return np.asarray(touched[division.part[touched] == part], np.int64)
