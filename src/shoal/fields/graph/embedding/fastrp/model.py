"""FastRP on a graph: all powers in one pass each, any range of rows, and rows that edges change.

Source: Chen et al., Fast and Accurate Network Embeddings via Very Sparse Random Projection, 2019,
algorithm 1.
Shapes: N nodes, d numbers of a vector, q powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.fields.graph.embedding.fastrp.native import product, projection
from shoal.fields.graph.embedding.protocols import EmbeddingError
from shoal.fields.graph.graph import CSRGraph

Gather = Callable[[np.ndarray], np.ndarray]
"""Puts the blocks of all ranks together, [rows of a rank, ...] to [N, ...]."""


class FastRPModel:
    """Vectors of the nodes of a graph, kept so that edges can be added.

    Args:
        graph: with N nodes.
        dim: numbers of a vector.
        weights: of the powers of the transition matrix, the first of them first.
        beta: exponent of the degrees in the projection.
        s: one in ``s`` numbers of the projection is not zero; "sqrt" for the root of N.
        normalise: rows of a power have length 1 before they are mixed.
        seed: of the projection.
        threads: that work.
        keep: the powers, q N d numbers, which :meth:`update` needs; not of a share.
        rows: the share of a rank, which reads only these rows of the graph; None for all.
        gather: of a rank: puts the blocks of all ranks together in their order.

    Raises:
        DataError: arrays of the graph do not fit together.
        EmbeddingError: weights that are negative, with a fractional ``beta``, or that add up to 0
            at a node.
    """

    def __init__(
        self,
        graph: CSRGraph,
        *,
        dim: int = 128,
        weights: Sequence[float] = (0.0, 1.0, 6.0, 1.0),
        beta: float = 0.0,
        s: float | str = 3.0,
        normalise: bool = True,
        seed: int = 0,
        threads: int = 1,
        keep: bool = False,
        rows: slice | None = None,
        gather: Gather = lambda block: block,
    ) -> None:
        graph.check_integrity()
        self.graph = graph.by_name()
        self.dim, self.weights, self.beta, self.normalise = dim, tuple(weights), beta, normalise
        self.seed, self.threads = seed, threads
        self.s = math.sqrt(max(graph.num_nodes, 1)) if isinstance(s, str) else float(s)
        self._powers: list[np.ndarray] | None = [] if keep and rows is None else None
        self._rows = slice(0, graph.num_nodes) if rows is None else rows
        self._gather = gather
        self._measure(gather(self.graph.degrees(self._rows.start, self._rows.stop)))
        self._mixed: np.ndarray | None = None

    @property
    def vectors(self) -> np.ndarray:
        """Float32 [N, d], or those of the share; computed when they are first asked for."""
        if self._mixed is None:
            self._mixed = self._run()
        if self.normalise or self.beta == 0:
            return self._mixed
        return self._mixed * np.float32(self._total**-self.beta)

    def sample(self, nodes: np.ndarray) -> np.ndarray:
        """Some rows of each power, of length 1 if they are normalised, float32 [q, len(nodes), d].

        Args:
            nodes: int64, rows.
        """
        rows = np.zeros((len(self.weights), len(nodes), self.dim), np.float32)
        whole, spare = self._projection(), None
        for k, mixed in enumerate(rows):
            if k + 1 < len(rows):
                size = (self.graph.num_nodes, self.dim)
                out = np.empty(size, np.float32) if spare is None else spare
                self._level(k, whole, slice(0, self.graph.num_nodes), out, None, 0.0)
            self._level(k, whole, nodes, None, mixed, 1.0)
            whole, spare = out, whole if k else None
        return rows

    @property
    def isolated(self) -> np.ndarray:
        """Nodes without neighbours, int64."""
        return np.flatnonzero(np.diff(self.graph.indptr) == 0)

    def power(self, k: int) -> np.ndarray:
        """The k-th power of the transition matrix times the projection, float32 [N, d], k from 1.

        Degrees are not divided by their sum, which scales all rows alike.
        """
        if not self._powers:
            raise EmbeddingError("power: none is kept; give keep=True, and ask for the vectors")
        return self._powers[k - 1]

    def update(self, source: Any, target: Any, weight: Any = None) -> np.ndarray:
        """Add edges, and compute the rows again that they change.

        Args:
            source: int [E], rows of nodes.
            target: int [E].
            weight: [E]; only of a graph with weights.

        Returns:
            The rows that were computed, int64: those within q hops of the edges.

        Raises:
            EmbeddingError: the powers were not kept.
            GraphError: there is no such node.
        """
        if self._powers is None:
            raise EmbeddingError("update: the powers were not kept; give keep=True")
        if self._mixed is None:
            self._mixed = self._run()
        before = self.graph
        self.graph = before.with_edges(source, target, weight).by_name()
        try:
            self._measure(self.graph.degrees())
        except EmbeddingError:
            self.graph = before
            self._measure(before.degrees())
            raise
        changed = np.zeros(before.num_nodes, bool)
        changed[np.asarray(source, np.int64)] = changed[np.asarray(target, np.int64)] = True
        reached = changed.copy()
        # Rows of the first power change too where a neighbour's degree has.
        for _ in range(len(self.weights) - (self.beta == 0)):
            reached |= self.graph.touching(reached)
        rows = np.flatnonzero(reached)
        mixed = np.zeros((len(rows), self.dim), np.float32)
        for power, out in zip(self._powers, self._levels(rows, mixed), strict=True):
            power[rows] = out
        self._mixed[rows] = mixed
        return rows

    def _measure(self, degrees: np.ndarray) -> None:
        """Factors of rows: 1 / degree, of the first power with the root of s, and degree^beta."""
        graph = self.graph
        signed = graph.weight is not None and bool((graph.weight < 0).any())
        if signed and not float(self.beta).is_integer():
            raise EmbeddingError(
                f"fastrp: the graph has negative weights, which beta = {self.beta} cannot be with; "
                "give whole numbers for beta, or other weights"
            )
        linked = np.diff(graph.indptr) > 0
        empty = linked & (degrees == 0)
        if empty.any():
            raise EmbeddingError(f"fastrp: the weights of node {empty.argmax()} add up to 0")
        self._total = float(degrees.sum())
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            inverse = np.where(linked, 1 / degrees, 0.0)
            scale = np.where(linked, degrees**self.beta, 0.0).astype(np.float32)
            mixed = linked.any() and not self.normalise
            whole = np.float64(self._total) ** -self.beta if mixed else 1.0
        if not (np.isfinite(scale).all() and np.isfinite(whole)) or (scale[linked] == 0).any():
            raise EmbeddingError(
                f"fastrp: beta = {self.beta}: degrees to that power are no numbers of float32; "
                "give one from -1 to 1"
            )
        self._inverse = inverse.astype(np.float32)
        self._first = (inverse * math.sqrt(self.s)).astype(np.float32)
        self._scale = None if self.beta == 0 else scale

    def _projection(self) -> np.ndarray:
        return projection(self.graph.keys(), self.dim, self.s, self.seed, threads=self.threads)

    def _run(self) -> np.ndarray:
        """The mixture of the share, float32 [R, d]."""
        rows = self._rows
        mixed = np.zeros((rows.stop - rows.start, self.dim), np.float32)
        whole = self._projection()
        last = max(k for k, alpha in enumerate(self.weights) if alpha)
        before: np.ndarray | None = None
        spare: np.ndarray | None = None
        for k, alpha in enumerate(self.weights):
            if k == last and self._powers is None:  # nothing is multiplied with it
                self._level(k, whole, rows, None, mixed, alpha)
                break
            out = np.empty_like(mixed) if spare is None else spare
            self._level(k, whole, rows, out, mixed, alpha)
            if self._powers is not None:
                self._powers.append(out)
            else:
                spare = before if whole is before else None
            before, whole = out, self._gather(out)
        return mixed

    def _levels(self, rows: np.ndarray, mixed: np.ndarray) -> Iterator[np.ndarray]:
        """Some rows of each power, after all of the one before are in place."""
        whole = self._projection()
        for k, alpha in enumerate(self.weights):
            out = np.empty_like(mixed)
            self._level(k, whole, rows, out, mixed, alpha)
            yield out
            assert self._powers is not None
            whole = self._powers[k]

    def _level(
        self,
        k: int,
        x: np.ndarray,
        rows: np.ndarray | slice,
        out: np.ndarray | None,
        mixed: np.ndarray | None,
        alpha: float,
    ) -> None:
        product(
            self.graph,
            x,
            self._inverse if k else self._first,
            scale=None if k else self._scale,
            rows=rows,
            out=out,
            mixed=mixed,
            alpha=alpha,
            normalise=self.normalise,
            threads=self.threads,
        )
