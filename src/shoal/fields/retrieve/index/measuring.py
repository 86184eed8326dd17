"""Recall and time of an index, by the effort of its searches."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shoal.fields.retrieve.index.exact import recall
from shoal.fields.retrieve.index.protocols import BuiltIndex, Hits

# Queries that are asked before any is timed.
_WARM = 8


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """What an effort gives.

    Args:
        effort: of the searches.
        recall: share of the true neighbours that were found.
        query_s: mean seconds of a query; they are asked one by one.
        p95_s: seconds that one of 20 queries exceeds.
    """

    effort: float
    recall: float
    query_s: float
    p95_s: float


def measured(index: BuiltIndex, queries: np.ndarray, truth: Hits, effort: float) -> FrontPoint:
    """Ask every query by itself.

    Args:
        index: what is asked.
        queries: float32 [Q, d].
        truth: of them, [Q, k].
        effort: of the searches.
    """
    k = truth.ids.shape[1]
    for query in queries[:_WARM]:
        index.search(query[None], k, effort)
    seconds, hits = [], []
    for query in queries:
        begin = time.perf_counter()
        hits.append(index.search(query[None], k, effort))
        seconds.append(time.perf_counter() - begin)
    every = Hits(
        ids=np.concatenate([one.ids for one in hits]),
        distances=np.concatenate([one.distances for one in hits]),
        stats={},
    )
    return FrontPoint(
        effort=effort,
        recall=recall(every, truth),
        query_s=float(np.mean(seconds)),
        p95_s=float(np.quantile(seconds, 0.95)),
    )


def front(
    index: BuiltIndex, efforts: tuple[float, ...], queries: np.ndarray, truth: Hits, wanted: float
) -> list[FrontPoint]:
    """Rising efforts until one finds the wanted share; the last is the one to take."""
    points: list[FrontPoint] = []
    for effort in efforts:
        points.append(measured(index, queries, truth, effort))
        if points[-1].recall >= wanted:
            break
    return points
