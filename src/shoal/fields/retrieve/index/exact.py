"""The exact nearest neighbours: the truth that indexes are held against."""

from __future__ import annotations

import numpy as np

from shoal.fields.retrieve.index.protocols import Hits, Metric

# Numbers of a block of distances.
_BLOCK = 1 << 24


def exact_neighbours(vectors: np.ndarray, queries: np.ndarray, k: int, metric: Metric) -> Hits:
    """The k nearest of each query, found by a product of matrices.

    Args:
        vectors: float32 [N, d].
        queries: float32 [Q, d].
        k: of each; fewer are padded with -1.
        metric: what is near; ``cosine`` expects vectors of length 1.
    """
    most = min(k, len(vectors))
    ids = np.full((len(queries), k), -1, np.int64)
    apart = np.full((len(queries), k), np.inf, np.float32)
    squares = np.einsum("nd,nd->n", vectors, vectors) if metric == "l2" else None
    for begin in range(0, len(queries) if most else 0, max(1, _BLOCK // len(vectors))):
        block = queries[begin : begin + max(1, _BLOCK // len(vectors))]
        found = -(block @ vectors.T)
        if squares is not None:
            found *= 2
            found += squares
        near = np.argpartition(found, most - 1, axis=1)[:, :most]
        rows = np.arange(len(block))[:, None]
        # Exact numbers of those that were chosen: the product has cancelled digits.
        if squares is not None:
            gaps = vectors[near] - block[:, None]
            exact = np.einsum("qkd,qkd->qk", gaps, gaps)
        else:
            exact = found[rows, near]
        order = np.lexsort((near, exact), axis=1)
        ids[begin : begin + len(block), :most] = near[rows, order]
        apart[begin : begin + len(block), :most] = exact[rows, order]
    return Hits(ids=ids, distances=apart, stats={})


def recall(hits: Hits, truth: Hits) -> float:
    """The share of the true neighbours that were found, ties counted as found.

    Args:
        hits: of an index.
        truth: exact, with as many of each query.
    """
    farthest = truth.distances.max(axis=1, where=np.isfinite(truth.distances), initial=-np.inf)
    least = np.abs(farthest) * 1e-5 + 1e-7
    found = (hits.ids >= 0) & (hits.distances <= (farthest + least)[:, None])
    wanted = (truth.ids >= 0).sum()
    return float(found.sum() / wanted) if wanted else 1.0
