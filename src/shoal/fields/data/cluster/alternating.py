"""Alternating: assign, then take the middle of each cluster, as k-means does. This is not PAM.

Source: Park, Jun, A Simple and Fast Algorithm for K-medoids Clustering, 2009; that it ends in worse
minima than PAM's swaps: Schubert, Rousseeuw, Fast and Eager k-Medoids Clustering, 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.cluster.costs import estimate_of, fitting
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.starts import begin
from shoal.fields.data.cluster.storage import Storage
from shoal.ir import Estimate, Interval, Machine


@part
class Alternating(MedoidMethod):
    """Alternate assignment and choice of medoids, as k-means; fast, with a higher loss than PAM.

    Args:
        storage: ``full32`` keeps all dissimilarities (4 n² bytes), ``condensed`` half of them,
            ``on_demand`` none: rows are computed in each round.
    """

    storage: Storage = "full32"

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """The rows of every cluster's objects, among themselves, in each round."""
        inside = 4 * work.rates.scan_s * work.n**2 + 6e-6 * work.n
        count = Interval(value=4.0, low=2.0, high=10.0)
        return estimate_of(work, self.storage, passes=count, pass_s=inside)

    def excess(self, work: ClusterWork) -> Interval:
        """It stops where only a swap between clusters would help."""
        return Interval(value=0.045, low=0.02, high=0.1)

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With every storage that fits."""
        for storage in fitting(work, machine):
            yield type(self)(storage=storage)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Move medoids until none moves."""
        rows = problem.kept(self.storage)
        search = begin(problem, rows)
        passes, moved = int((problem.state or {}).get("passes", 0)), True
        while moved and passes < problem.max_iter:
            inside = np.zeros(search.n)
            for block in rows.blocks():
                piece = rows.rows(block.start, block.stop - block.start)
                for at, row in enumerate(range(block.start, block.stop)):
                    same = search.near == search.near[row]
                    inside[row] = piece[at, same].sum(dtype=np.float64)
            moved = False
            near = search.near.copy()
            for place in range(search.k):
                members = np.flatnonzero(near == place)
                if not len(members):
                    continue
                best = int(members[inside[members].argmin()])
                if inside[best] < inside[search.medoids[place]] and not search.is_medoid[best]:
                    search.swap(place, best, rows.some(np.array([best]))[0])
                    moved = True
            passes += 1
            search.loss = float(search.d1.sum(dtype=np.float64))
            state = {"medoids": search.medoids.tolist(), "swaps": search.swaps, "passes": passes}
            problem.tick(passes / (passes + 1), search.loss, state)
        return ClusteringResult(
            search.medoids, search.loss, search.swaps, passes, converged=not moved
        )
