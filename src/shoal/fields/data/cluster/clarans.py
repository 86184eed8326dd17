"""FasterCLARANS: candidates at random, each against all medoids at once.

Source: Ng, Han, CLARANS: A Method for Clustering Objects for Spatial Data Mining, 2002; Schubert,
Rousseeuw, Fast and Eager k-Medoids Clustering, 2021, section 5 (only the candidate is drawn, so
2.5 % of n - k failures stand for the 2.5 % of k (n - k) pairs of the original).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.cluster.costs import estimate_of, fitting
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.search import MedoidSearch, eager, native
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.starts import start
from shoal.fields.data.cluster.storage import Storage
from shoal.ir import Estimate, Interval, Machine

# Candidates that are drawn at a time.
_DRAWN = 64


@part
class CLARANS(MedoidMethod):
    """Try random swaps until many in a row do not improve; reads few rows.

    Args:
        restarts: number of searches from random starts; the best result is returned.
        patience: give up after this share of n - k candidates in a row without a swap.
        storage: ``on_demand`` computes only the rows that are drawn; ``full32`` keeps all
            dissimilarities, ``condensed`` half of them.
    """

    restarts: Annotated[int, Ge(1)] = 2
    patience: Annotated[float, Gt(0), Le(1)] = 0.025
    storage: Storage = "on_demand"

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """The rows that are drawn, of each restart: a share of all."""
        # More medoids take more swaps, after each of which patience begins anew.
        share = self.restarts * self.patience / 0.025 * 0.026 * work.k**0.7
        drawn = Interval(value=share, low=0.5 * share, high=2.5 * share)
        swaps = 3.5 * work.k * self.restarts * work.n * work.rates.repair_s
        scan = work.rates.scan_s * work.n**2
        return estimate_of(
            work.model_copy(update={"init": "random"}),
            self.storage,
            passes=drawn,
            pass_s=scan,
            once_s=swaps,
        )

    def excess(self, work: ClusterWork) -> Interval:
        """It gives up before all candidates were tried."""
        return Interval(value=0.008, low=0.0, high=0.02)

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """With rows as they are drawn, where they are computed; with given ones, as they are."""
        for storage in fitting(work, machine):
            if storage == ("on_demand" if work.dim else "full32"):
                yield type(self)(restarts=self.restarts, patience=self.patience, storage=storage)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Descend from each start; keep the best."""
        rows = problem.kept(self.storage)
        n, k = rows.n, problem.k
        limit = max(1, math.ceil(self.patience * (n - k)))
        state = problem.state or {"best": None, "restart": 0, "batch": 0, "swaps": 0}
        best = state["best"]
        loss = np.inf if best is None else float(state["loss"])
        swaps, first, batches = int(state["swaps"]), int(state["restart"]), 0
        for restart in range(first, self.restarts):
            resumed = problem.state is not None and restart == first
            if resumed and state["batch"]:
                medoids = np.array(state["medoids"], np.int64)
            elif problem.start is not None and restart == 0:
                medoids = np.array(problem.start, np.int64)
            else:
                medoids = start(problem.init, rows, k, problem.seed + restart)
            search = MedoidSearch(medoids, np.ascontiguousarray(rows.some(medoids).T), native())
            search.swaps = swaps
            search.since = int(state["since"]) if resumed and state["batch"] else 0
            batch = int(state["batch"]) if resumed else 0
            while search.since < limit:
                draw = generator(problem.seed, purpose="clarans", step=restart, index=batch)
                ids = draw.integers(0, n, _DRAWN)
                # Medoids are no candidates, and no failures.
                ids = ids[search.is_medoid[ids] == 0]
                whole = rows.whole
                eager(
                    search,
                    whole if whole is not None else rows.some(ids),
                    ids,
                    ids if whole is not None else np.arange(len(ids)),
                    limit=limit,
                    threads=problem.threads,
                )
                batch, batches = batch + 1, batches + 1
                problem.tick(
                    (restart + min(search.since / limit, 1.0)) / self.restarts,
                    min(loss, search.loss),
                    {
                        "best": best,
                        "loss": loss if best is not None else None,
                        "medoids": search.medoids.tolist(),
                        "restart": restart,
                        "batch": batch,
                        "since": search.since,
                        "swaps": search.swaps,
                    },
                )
            swaps = search.swaps
            if search.loss < loss:
                best, loss = search.medoids.tolist(), search.loss
        return ClusteringResult(np.array(best, np.int64), loss, swaps, batches, converged=False)
