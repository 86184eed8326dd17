"""PPP as a method of the job ``cluster``: its price, and what a run keeps of it.

Source: Probabilistic Partitive Partitioning, 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.core.svg import Chart, Series
from shoal.fields.data.cluster.ppp.costs import price
from shoal.fields.data.cluster.protocols import (
    ClusterError,
    Clustering,
    ClusteringProblem,
    ClusterWork,
)
from shoal.fields.data.cluster.storage import Vectors
from shoal.ir import Estimate, Interval, Machine

_EUCLIDEAN = (
    "method = ppp: it averages vectors in Euclidean space; leave out metric, or choose a method "
    "that finds medoids, such as fasterpam"
)


@part
class PartitivePartitioning:
    """Find how many clusters there are, and the same ones from every seed; for vectors.

    Args:
        k_max: most clusters, where the job's ``k`` is auto.
        restarts: of k-means for each number of clusters.
        tau: least posterior of an object that is surely in its cluster.
    """

    k_max: Annotated[int, Ge(1)] = 20
    restarts: Annotated[int, Ge(2)] = 10
    tau: Annotated[float, Gt(0), Le(1)] = 0.95

    finds_k: ClassVar[bool] = True
    assumes: ClassVar[str] = (
        "rounds of k-means and of EM, and how often parts are cut again, are assumed from runs on "
        "bundled tables and on blobs, 150 to 1,000,000 objects"
    )

    def estimate(self, work: ClusterWork, machine: Machine) -> Estimate:
        """The sweep over all k, tests of mixtures, micro-clusters of many rows."""
        if not work.dim or work.metric != "euclidean":
            raise ClusterError(_EUCLIDEAN)
        return price(work, machine, self._most(work.k, work.n), self.restarts)

    def excess(self, work: ClusterWork) -> Interval | None:
        """It does not minimize the loss of medoids."""
        return None

    def candidates(self, work: ClusterWork, machine: Machine) -> Iterator[Self]:
        """Where the number of clusters is to be found, of vectors in Euclidean space."""
        if not work.k and work.dim and work.metric == "euclidean":
            yield type(self)()

    def cluster(self, problem: ClusteringProblem) -> Clustering:
        """Find clusters.

        Raises:
            ClusterError: there are no vectors, or their metric is not Euclidean.
        """
        from shoal.fields.data.cluster.ppp.estimator import PPP

        objects = problem.objects
        if not isinstance(objects, Vectors) or objects.metric != "euclidean":
            raise ClusterError(_EUCLIDEAN)
        X = objects.rows()
        most = self._most(problem.k, len(X))
        model = PPP(most, self.restarts, self.tau, random_state=problem.seed)
        model.fit_saying(X, problem.say)
        labels, centres = model.labels_, model.cluster_centers_
        apart = np.sqrt(((X - centres[labels]) ** 2).sum(axis=1))
        sizes = np.bincount(labels, minlength=model.n_clusters_).tolist()
        sweep = model.report_["sweep"]
        return Clustering(
            labels=labels,
            measured={
                "clusters": float(model.n_clusters_),
                "separable": model.report_["separable"],
            },
            what="centre",
            names=[_short(centre) for centre in centres],
            columns={"separable": model.separable_mask_, "distance": apart},
            files={
                "centres.json": {
                    "centres": centres.tolist(),
                    "sizes": sizes,
                    "report": model.report_,
                }
            },
            pictures={"sweep.svg": _picture(sweep)} if sweep else {},
            details={"report": model.report_},
        )

    def _most(self, k: int, n: int) -> int:
        """Most clusters: the job's k where it has one; of few objects, half of them."""
        return min(k or self.k_max, max(1, n // 2))


def _short(centre: np.ndarray) -> str:
    more = ", ..." if len(centre) > 4 else ""
    return ", ".join(f"{number:.4g}" for number in centre[:4]) + more


def _picture(sweep: list[dict[str, float]]) -> str:
    k = [row["k"] for row in sweep]
    series = [
        Series(name, k, [row[name] for row in sweep], points=True)
        for name in ("repeatability", "validation", "compactness")
    ]
    return Chart(
        title="How repeatable each number of clusters is",
        description="Repeatability of k-means, agreement with a mixture, and scatter within the "
        "clusters as a share of all, by number of clusters.",
        x_label="clusters",
        y_label="index",
        series=series,
        cover_y=(0.0, 1.0),
    ).render()
