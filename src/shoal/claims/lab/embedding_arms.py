"""Embeddings of nodes that a claim compares: timed arms, another FastRP, and the paper's formula.

Source: Chen et al., Fast and Accurate Network Embeddings via Very Sparse Random Projection, 2019.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.embedding.fastrp.native import projection

Embed = Callable[[int], np.ndarray]
"""Vectors [N, d] of a seed."""


class TimedEmbeddings:
    """Arms that say their seconds, and keep their vectors.

    Args:
        seed: of the first embedding of each arm; the next has the next.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kept: dict[str, list[np.ndarray]] = {}

    def arm(self, name: str, embed: Embed) -> Callable[[], float]:
        """Seconds of an embedding."""
        rows = self.kept.setdefault(name, [])

        def seconds() -> float:
            begin = time.perf_counter()
            vectors = embed(self.seed + len(rows))
            passed = time.perf_counter() - begin
            rows.append(vectors)
            return passed

        return seconds


def rust_fastrp(graph: CSRGraph, weights: Sequence[float], dim: int) -> Embed:
    """The package fastrp with the same matrix, powers and weights, in all its threads.

    Args:
        graph: without weights.
        weights: of the powers.
        dim: numbers of a vector.
    """
    fastrp: Any = import_extra("fastrp", extra="bench", purpose="the peer of the claim")
    indices, ones = graph.indices.astype(np.int64), np.ones(graph.nnz)
    mixed = [0.0, *weights]  # its first weight is that of the projection itself

    def embed(seed: int) -> np.ndarray:
        vectors: np.ndarray = fastrp.fit_csr(
            graph.indptr, indices, ones, graph.num_nodes, dim, weights=mixed, seed=seed,
            undirected=False,
        )  # fmt: skip
        return vectors

    return embed


def dense_fastrp(
    graph: CSRGraph,
    *,
    dim: int,
    weights: Sequence[float],
    beta: float,
    seed: int,
    s: float = 3.0,
    normalise: bool = True,
) -> np.ndarray:
    """Sum of ``weights[k] * normalise((D^-1 S)^k L R)`` with the same R, float64 [N, dim].

    Args:
        graph: with N nodes.
        dim: numbers of a vector.
        weights: of the powers.
        beta: exponent of the degrees.
        seed: of the projection.
        s: one in ``s`` numbers of the projection is not zero.
        normalise: rows of a power have length 1.
    """
    n = graph.num_nodes
    S = np.zeros((n, n))
    S[graph.edges()] = 1.0 if graph.weight is None else graph.weight
    degrees = S.sum(axis=1)
    linked = degrees > 0
    safe = np.where(linked, degrees, 1.0)
    L = np.where(linked, (safe / degrees.sum()) ** beta, float(beta == 0))
    power = L[:, None] * projection(graph.keys(), dim, s, seed) * math.sqrt(s)
    total = np.zeros((n, dim))
    for alpha in weights:
        power = (S / safe[:, None]) @ power
        length = np.linalg.norm(power, axis=1, keepdims=True)
        total += alpha * (power / np.where(length > 0, length, 1.0) if normalise else power)
    return total
