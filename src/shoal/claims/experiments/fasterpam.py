"""[47] FasterPAM: is sharing and eager swapping hundreds of times faster than PAM, at its loss?

Source: Schubert, Rousseeuw, Fast and Eager k-Medoids Clustering: O(k) Runtime Improvement of the
PAM, CLARA, and CLARANS Algorithms, 2021.

Only swaps are timed, from the same dissimilarities and start. PAM is the textbook's, by the same
compiler, held against the authors' own. The A/A run has PAM, and the authors' FasterPAM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.extras import import_extra
from shoal.core.parts import part, table
from shoal.core.random import generator
from shoal.corpora.photos import photo_descriptors
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult
from shoal.fields.data.cluster.solve import MedoidMethod
from shoal.fields.data.cluster.storage import Matrix, Vectors

_MOST = 10_000


@part
class FasterPAMClaim(BaseClaim, row=47, needs=("c++",)):
    """The swaps of FasterPAM, FastPAM1 and PAM, and of the authors' package.

    Args:
        pairs: rounds of each timing.
    """

    pairs: int = 7

    def collect(self, run: ClaimRun) -> None:
        """Count; the full run times PAM for some minutes, then the package."""
        small = (*run.remember("small", partial(_given, 2000)), _start(2000, 100, run.seed))
        eager, steep = _found("fasterpam", *small), _found("fastpam1", *small)
        # PAM compares all objects for each medoid and candidate; FasterPAM for each candidate.
        run.put("compared_over_pam", run.pick(100 * steep.passes / eager.passes, 1.0))
        run.put("loss_over_pam", run.pick(eager.loss / steep.loss, 1.0))
        if run.quick:
            return
        run.progress("timing PAM", 0.1)
        textbook = partial(_found, "pam", *small)
        pam = run.remember("pam", textbook)
        other = set(pam.medoids.tolist()) ^ set(steep.medoids.tolist())
        run.put("fastpam1_other_medoids", len(other))
        ours = run.pick(partial(_found, "fasterpam", *small), textbook)
        run.put("over_pam", *self._timed(run, ours, textbook))
        package: Any = import_extra("kmedoids", extra="bench", purpose="the peer of the claim")
        first = (small[1].whole, small[2].astype(np.uint64), 3)  # swaps
        beside = partial(self._timed, run, partial(textbook, 3), partial(package.pam, *first))
        run.put_peer("over_pam", *run.remember("peer", beside))
        large, apart = run.remember("large", partial(_given, 8000)), []
        for k in (100, 200):
            run.progress(f"timing the package, k = {k}", 0.4 + k / 500)
            start = _start(8000, k, run.seed)
            chosen = (large[1].whole, start.astype(np.uint64), _MOST)
            theirs = partial(package.fasterpam, *chosen, n_cpu=1)
            mine = partial(_found, "fasterpam", *large, start)
            run.put(f"over_package_k{k}", *self._timed(run, run.pick(mine, theirs), theirs))
            apart.append(abs(mine().loss / theirs().loss - 1))
        run.put("loss_apart", apart)

    def _timed(
        self, run: ClaimRun, method: Callable[[], Any], baseline: Callable[[], Any]
    ) -> tuple[list[float], tuple[float, ...]]:
        """Seconds of both, turn by turn; the quick one several times in its turn."""
        begin = time.perf_counter()
        method()
        times = max(1, min(20, round(0.3 / (time.perf_counter() - begin))))
        arms = {"method": lambda: [method() for _ in range(times)], "baseline": baseline}
        seconds = run.race(arms, self.pairs, warmup=0, swaps={})
        return [taken / times for taken in seconds["method"]], seconds["baseline"]


def _given(n: int) -> tuple[Vectors, Matrix]:
    """Descriptors, and their dissimilarities."""
    objects = Vectors(photo_descriptors(n).vectors)
    return objects, Matrix(objects)


def _start(n: int, k: int, seed: int) -> Any:
    return generator(seed, purpose="start", index=k).choice(n, k, replace=False)


def _found(
    name: str, objects: Vectors, rows: Matrix, start: Any, most: int = _MOST
) -> ClusteringResult:
    method: MedoidMethod = table("clusterer").build(name)
    return method.search(
        ClusteringProblem(objects, len(start), start=start, max_iter=most, rows=rows)
    )
