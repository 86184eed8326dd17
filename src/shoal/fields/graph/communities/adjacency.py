"""Sets of neighbours as they are: exact similarities, beside which estimates are judged."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from shoal.fields.graph.communities.native import jaccard_rows
from shoal.fields.graph.graph import CSRGraph

# Rows that are compared with all others at once.
_TOGETHER = 64

Side: TypeAlias = Literal["in", "out", "both"]
"""Whose vertices make up a vertex's set: of edges to it, from it, or both."""


def sets_of(graph: CSRGraph, side: Side) -> Any:
    """The set of each vertex, a row of a sparse matrix [N, N] of SciPy with ones.

    Args:
        graph: of N vertices; its weights do not count.
        side: of an edge; the same for all of them if the graph is undirected.
    """
    from scipy.sparse import csr_matrix

    ones = np.ones(graph.nnz, np.int8)
    shape = (graph.num_nodes, graph.num_nodes)
    matrix = csr_matrix((ones, graph.indices, graph.indptr), shape=shape)
    if graph.directed and side != "out":
        matrix = (matrix.T if side == "in" else matrix.maximum(matrix.T)).tocsr()
        matrix.sort_indices()
    return matrix


class AdjacencySets:
    """Exact Jaccard similarities of sets of neighbours, by the sets that each member is in.

    Args:
        sets: sparse matrix [N, M] of SciPy in rows, with ones; row i is the set of vertex i.
    """

    def __init__(self, sets: Any) -> None:
        self.sets = sets
        self.sizes = np.diff(sets.indptr).astype(np.float64)
        self.inverse = sets.T.tocsr()
        for matrix in (self.sets, self.inverse):
            matrix.sort_indices()

    def with_all(self, rows: np.ndarray, *, later: bool = False) -> np.ndarray:
        """Jaccard similarity of rows with every vertex, float32 [n, N].

        Args:
            rows: int64 [n].
            later: only with vertices behind each; the others are 0.
        """
        return jaccard_rows(self.sets, self.inverse, rows, later=later)

    def candidates(self, seeds: np.ndarray) -> np.ndarray:
        """Rows that share a member with a seed."""
        near = self.with_all(seeds).max(axis=0) > 0
        near[seeds] = False
        return np.flatnonzero(near)

    def similarity(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Jaccard similarity of rows with others, float64 [n, m]; empty sets have none."""
        similar = np.empty((len(rows), len(others)))
        for first in range(0, len(rows), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            similar[some] = self.with_all(rows[some])[:, others]
        return similar

    def union(self, rows: np.ndarray, candidates: np.ndarray) -> SetUnion:
        """The union of the sets of some rows."""
        return SetUnion(self, rows, candidates)


class SetUnion:
    """The union of a community's sets, member by member.

    Args:
        graph: of the sets.
        rows: in the community.
        candidates: for it.
    """

    def __init__(self, graph: AdjacencySets, rows: np.ndarray, candidates: np.ndarray) -> None:
        self._graph, self._candidates = graph, candidates
        self._there = np.zeros(graph.sets.shape[1], bool)
        self._shared = np.zeros(graph.sets.shape[0])
        for row in rows:
            self._put(int(row))

    def scores(self) -> np.ndarray:
        """Jaccard similarity of the union with each candidate."""
        both = self._shared[self._candidates]
        size = np.count_nonzero(self._there)
        return np.asarray(both / (size + self._graph.sizes[self._candidates] - both))

    def add(self, at: int) -> None:
        """Put the set of a candidate into the union."""
        self._put(int(self._candidates[at]))

    def _put(self, row: int) -> None:
        sets, inverse = self._graph.sets, self._graph.inverse
        members = sets.indices[sets.indptr[row] : sets.indptr[row + 1]]
        new = members[~self._there[members]]
        self._there[new] = True
        self._shared += np.bincount(inverse[new].indices, minlength=len(self._shared))
