"""FasterPAM: every improving swap is made at once.

Source: Schubert, Rousseeuw, Fast and Eager k-Medoids Clustering: O(k) Runtime Improvement of the
PAM, CLARA, and CLARANS Algorithms, 2021, algorithm 3.

A candidate is held against all k medoids in one pass over its row: what it takes from objects that
lose no medoid is shared by the k swaps, what it saves of a removed medoid's objects is added where
that medoid is. It costs O(n + k), where the textbook takes O(n k).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.cluster.costs import estimate_of, fitting
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.search import MedoidSearch, eager
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.starts import begin
from shoal.fields.data.cluster.storage import DissimilarityRows, Storage
from shoal.ir import Estimate, Interval, Machine

# Passes over all candidates until one brings nothing, from a random start.
PASSES = Interval(value=4.0, low=2.5, high=7.0)
# Swaps for each medoid, from a random start.
SWAPS = 4.5


@part
class FasterPAM(MedoidMethod):
    """Execute every improving swap at once; the quality of PAM, about a hundred times faster.

    Args:
        storage: ``full32`` stores all dissimilarities (4 n² bytes), ``condensed`` half of them,
            ``on_demand`` none: rows are computed in each pass.
    """

    storage: Storage = "full32"

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """Dissimilarities once, or once a pass; a row of n for each candidate; the swaps."""
        swaps = SWAPS * work.k * work.n * work.rates.repair_s
        scan = work.rates.scan_s / work.threads * work.n**2
        return estimate_of(work, self.storage, passes=PASSES, pass_s=scan, once_s=swaps)

    def excess(self, work: ClusterWork) -> Interval:
        """What the others are held against."""
        return Interval.exact(0.0)

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With every storage that fits."""
        for storage in fitting(work, machine):
            yield type(self)(storage=storage)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Swap until a whole cycle of candidates brings nothing."""
        rows = problem.kept(self.storage)
        return descend(begin(problem, rows), rows, problem)


def descend(
    search: MedoidSearch, rows: DissimilarityRows, problem: ClusteringProblem
) -> ClusteringResult:
    """Take all candidates in order, over and over, until a cycle of them brings nothing.

    Args:
        search: is changed.
        rows: dissimilarities.
        problem: its ``max_iter``, ``threads``, ``tick`` and, to go on, ``state``.
    """
    state = problem.state or {}
    passes, at = int(state.get("passes", 0)), int(state.get("at", 0))
    while passes < problem.max_iter and search.since < search.n:
        for block in rows.blocks():
            if block.stop <= at:
                continue
            first = max(block.start, at)
            ids = np.arange(first, block.stop)
            piece = rows.rows(first, len(ids))
            at = first + eager(
                search,
                piece,
                ids,
                np.arange(len(ids)),
                limit=search.n,
                threads=problem.threads,
            )
            problem.tick(
                _done(search.since, search.n, passes, at),
                search.loss,
                {
                    "medoids": search.medoids.tolist(),
                    "swaps": search.swaps,
                    "since": search.since,
                    "passes": passes,
                    "at": at,
                },
            )
            if search.since >= search.n:
                break
        passes, at = passes + 1, 0
    return ClusteringResult(
        search.medoids, search.loss, search.swaps, passes, converged=search.since >= search.n
    )


def _done(since: int, n: int, passes: int, at: int) -> float:
    """At least this much of the work: what was done, over it and what a last cycle needs."""
    past = passes * n + at
    return past / (past + n - since) if past + n > since else 1.0
