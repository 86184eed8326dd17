"""FastPAM1: the swaps of PAM, each found k times faster.

Source: Schubert, Rousseeuw, Faster k-Medoids Clustering: Improving the PAM, CLARA, and CLARANS
Algorithms, 2019; Fast and Eager k-Medoids Clustering, 2021, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.cluster import reference
from shoal.fields.data.cluster.costs import estimate_of, fitting
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.search import best_swap
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.starts import begin
from shoal.fields.data.cluster.storage import Storage
from shoal.ir import Estimate, Interval, Machine

# The loss after a steepest descent differs from an eager one's either way.
EXCESS = Interval(value=0.0, low=-0.005, high=0.005)


def rounds(work: ClusterWork) -> Interval:
    """How many best swaps a steepest descent makes, and one round that finds none."""
    per_medoid = 1.2 if work.init == "random" else 0.3
    return Interval(
        value=per_medoid * work.k + 1, low=0.6 * per_medoid * work.k + 1, high=2.0 * work.k + 5
    )


@part
class FastPAM1(MedoidMethod):
    """Execute the best swap of each round; gives the result of PAM, faster.

    Args:
        storage: ``full32`` keeps all dissimilarities (4 n² bytes), ``condensed`` half of them,
            ``on_demand`` none: rows are computed in each round.
    """

    storage: Storage = "full32"

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """All rows for each swap that is made."""
        scan = (work.rates.scan_s / work.threads) * work.n**2 + work.rates.repair_s * work.n
        return estimate_of(work, self.storage, passes=rounds(work), pass_s=scan)

    def excess(self, work: ClusterWork) -> Interval:
        """That of PAM."""
        return EXCESS

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With every storage that fits; rows are not recomputed for each swap."""
        for storage in fitting(work, machine):
            if storage != "on_demand":
                yield type(self)(storage=storage)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Swap until no swap improves the loss."""
        return steepest(problem, self.storage, textbook=False)


def steepest(problem: ClusteringProblem, storage: Storage, *, textbook: bool) -> ClusteringResult:
    """Make the best of all swaps, over and over, until none improves the loss.

    Args:
        problem: what is searched.
        storage: how dissimilarities are kept.
        textbook: compute the change of each pair of medoid and candidate by itself.
    """
    rows = problem.kept(storage)
    search = begin(problem, rows)
    passes, done = int((problem.state or {}).get("passes", 0)), False
    while passes < problem.max_iter and not done:
        best, row = (0.0, -1, -1, -1), None
        # A candidate of the textbook takes k times as long.
        step = max(1, 4096 // search.k) if textbook else search.n
        for block in rows.blocks():
            for first in range(block.start, block.stop, step):
                count = min(step, block.stop - first)
                piece = rows.rows(first, count)
                result = best_swap(
                    search,
                    piece,
                    np.arange(first, first + count),
                    best=best,
                    textbook=textbook,
                    threads=problem.threads,
                )
                if result != best:
                    best, row = result, piece[result[3]].copy()
                state = {"medoids": search.medoids.tolist(), "swaps": search.swaps}
                past = passes + (first + count) / search.n
                problem.tick(past / (past + 1), search.loss, {**state, "passes": passes})
        passes += 1
        # The textbook's sums are rounded: what they call an improvement may be none.
        change = 0.0 if row is None else float(reference.changes(search, row)[best[1]])
        done = not change < -reference.LEAST * search.loss
        if row is not None and not done:
            search.loss += change
            search.swap(best[1], best[2], row)
    return ClusteringResult(search.medoids, search.loss, search.swaps, passes, converged=done)
