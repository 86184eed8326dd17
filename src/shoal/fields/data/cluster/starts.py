"""The medoids that a search begins with.

Source: Kaufman, Rousseeuw, Clustering by Means of Medoids, 1987 (BUILD); Schubert, Rousseeuw,
Faster k-Medoids Clustering, 2019 (LAB); Fast and Eager k-Medoids Clustering, 2021, which recommends
the random start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.cluster.protocols import ClusteringProblem
from shoal.fields.data.cluster.search import Floats, Ids, MedoidSearch, gains, native
from shoal.fields.data.cluster.storage import DissimilarityRows


def started(problem: ClusteringProblem, rows: DissimilarityRows) -> Ids:
    """Int64 [k]: the medoids a problem begins with, those of its state first."""
    if problem.state is not None:
        return np.array(problem.state["medoids"], np.int64)
    if problem.start is not None:
        return np.array(problem.start, np.int64)
    return start(problem.init, rows, problem.k, problem.seed)


def begin(
    problem: ClusteringProblem, rows: DissimilarityRows, medoids: Ids | None = None
) -> MedoidSearch:
    """A search that stands where a problem begins, or goes on."""
    chosen = started(problem, rows) if medoids is None else medoids
    medoid_search = MedoidSearch(chosen, np.ascontiguousarray(rows.some(chosen).T), native())
    if problem.state is not None:
        medoid_search.swaps = int(problem.state["swaps"])
        medoid_search.since = int(problem.state.get("since", 0))
    return medoid_search


def start(init: str, rows: DissimilarityRows, k: int, seed: int) -> Ids:
    """Int64 [k] distinct objects.

    Args:
        init: ``random``: uniform; ``build``: one after the other the object that takes most off
            the loss, O(n² k); ``lab``: the same among 10 + sqrt(n) objects drawn anew for each.
        rows: dissimilarities.
        k: how many.
        seed: of the draws.
    """
    n = rows.n
    if init == "random":
        return generator(seed, purpose="medoids").choice(n, k, replace=False).astype(np.int64)
    chosen: list[int] = []
    nearest: Floats | None = None
    for step in range(k):
        best, gain = -1, -np.inf
        for ids, piece in _candidates(init, rows, chosen, seed, step):
            # The first medoid is the object with the least sum.
            result = (
                gains(piece, nearest) if nearest is not None else -piece.sum(1, dtype=np.float64)
            )
            result[np.isin(ids, chosen)] = -np.inf
            at = int(result.argmax())
            if result[at] > gain:
                best, gain = int(ids[at]), float(result[at])
        chosen.append(best)
        row = rows.some(np.array([best]))[0]
        nearest = row if nearest is None else np.minimum(nearest, row)
    return np.array(chosen, np.int64)


def _candidates(
    init: str, rows: DissimilarityRows, chosen: list[int], seed: int, step: int
) -> Iterator[tuple[Any, Floats]]:
    if init == "lab":
        size = min(rows.n, 10 + math.ceil(math.sqrt(rows.n)))
        drawn = generator(seed, purpose="lab", step=step).choice(rows.n, size, replace=False)
        ids = np.setdiff1d(drawn, chosen)
        if not len(ids):  # few objects, and all that were drawn are medoids
            ids = np.setdiff1d(np.arange(rows.n), chosen)
        yield ids, rows.some(ids)
        return
    for block in rows.blocks():
        yield np.arange(block.start, block.stop), rows.rows(block.start, block.stop - block.start)
