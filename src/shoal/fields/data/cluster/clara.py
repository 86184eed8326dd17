"""FasterCLARA: FasterPAM on samples, judged by the loss of all objects.

Source: Kaufman, Rousseeuw, Clustering Large Data Sets, 1986 (CLARA); Schubert, Rousseeuw, Fast and
Eager k-Medoids Clustering, 2021, section 5 (samples of 80 + 4k, and FasterPAM on each).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.cluster.costs import state_bytes
from shoal.fields.data.cluster.fasterpam import FasterPAM
from shoal.fields.data.cluster.protocols import ClusteringProblem, ClusteringResult, ClusterWork
from shoal.fields.data.cluster.solve import BLOCK, MedoidMethod, to_medoids
from shoal.ir import Estimate, Interval, Machine


@part
class CLARA(MedoidMethod):
    """Cluster samples and return the medoids with the least loss on all objects; for large data.

    Args:
        samples: number of samples.
        size: objects of a sample; 0 for 80 + 4k.
    """

    samples: Annotated[int, Ge(1)] = 5
    size: Annotated[int, Ge(0)] = 0

    def sampled(self, n: int, k: int) -> int:
        """Objects of a sample of n."""
        return min(n, max(self.size or 80 + 4 * k, k + 1))

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """Each sample clustered, and all objects assigned."""
        size = self.sampled(work.n, work.k)
        one = FasterPAM().estimate(work.model_copy(update={"n": size, "init": "random"}), machine)
        whole = work.n * work.k * (work.rates.distance_s or work.rates.scan_s)
        total = Interval(
            value=one.step_s.value + whole,
            low=one.step_s.low + whole / (1 + work.rates.spread),
            high=one.step_s.high + whole * (1 + work.rates.spread),
        ).scaled(self.samples)
        return one.model_copy(
            update={
                "step_s": total,
                "total_s": total,
                "terms_s": {"data": total.value},
                "memory_bytes": {
                    **one.memory_bytes,
                    "medoids": state_bytes(size, work.k) + 4.0 * BLOCK,
                    "objects": 16.0 * work.n * work.dim or 4.0 * work.n**2,
                },
                "bound": "compute",
            }
        )

    def excess(self, work: ClusterWork) -> Interval:
        """The smaller the share that a sample is of all, the more."""
        share = self.sampled(work.n, work.k) / work.n
        value = 0.045 * (1 - share)
        return Interval(value=value, low=0.3 * value, high=2 * value)

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """Where a sample is much smaller than all: as published, and with larger samples."""
        for size in (0, 4 * (80 + 4 * work.k)):
            if 2 * (size or 80 + 4 * work.k) <= work.n:
                yield type(self)(samples=self.samples, size=size)

    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Cluster each sample from the best medoids so far and others drawn for it."""
        objects, n, k = problem.objects, problem.objects.n, problem.k
        size = self.sampled(n, k)
        state = problem.state or {}
        best = np.array(state["medoids"], np.int64) if state else None
        loss, swaps = float(state.get("loss", np.inf)), int(state.get("swaps", 0))
        losses: list[float] = list(state.get("losses", []))
        for sample in range(len(losses), self.samples):
            draw = generator(problem.seed, purpose="clara", step=sample)
            ids = draw.choice(n, size, replace=False).astype(np.int64)
            if best is not None:
                ids = np.concatenate([best, ids[~np.isin(ids, best)]])[:size]
            inner = replace(
                problem,
                objects=objects.subset(ids),
                start=None,
                seed=problem.seed + sample,
                state=None,
                rows=None,
                tick=lambda done, loss, state: None,
                say=lambda done, text: None,
            )
            match = FasterPAM().search(inner)
            medoids = ids[match.medoids]
            swaps += match.swaps
            total = float(to_medoids(objects, medoids)[1].sum(dtype=np.float64))
            losses.append(total)
            if total < loss:
                best, loss = medoids, total
            assert best is not None
            problem.tick(
                (sample + 1) / self.samples,
                loss,
                {"medoids": best.tolist(), "swaps": swaps, "loss": loss, "losses": [*losses]},
            )
        return ClusteringResult(best, loss, swaps, self.samples, details={"losses": losses})
