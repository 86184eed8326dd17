"""PAM: the textbook's swaps, every pair of medoid and candidate by itself.

Source: Kaufman, Rousseeuw, Clustering by Means of Medoids, 1987; Finding Groups in Data, 1990,
chapter 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from shoal.core.parts import part
from shoal.fields.data.cluster.costs import estimate_of, fitting
from shoal.fields.data.cluster.fastpam1 import EXCESS, rounds, steepest
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.storage import Storage
from shoal.ir import Estimate, Interval, Machine


@part
class PAM(MedoidMethod):
    """The original method, compiled; the baseline, k times slower than the others.

    Args:
        storage: ``full32`` keeps all dissimilarities (4 n² bytes), ``condensed`` half of them,
            ``on_demand`` none: rows are computed in each round.
    """

    storage: Storage = "full32"

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """All rows, k times, for each swap that is made."""
        scan = (work.rates.textbook_s / work.threads) * work.k * float(work.n) ** 2
        return estimate_of(work, self.storage, passes=rounds(work), pass_s=scan)

    def excess(self, work: ClusterWork) -> Interval:
        """That of steepest descent."""
        return EXCESS

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With all dissimilarities, if they fit: half of them would save nothing that counts."""
        for storage in fitting(work, machine):
            if storage == "full32":
                yield type(self)(storage=storage)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Swap until no swap improves the loss."""
        return steepest(problem, self.storage, textbook=True)
