"""The job ``cluster``: group objects around medoids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.cluster.job import ClusterJob, ClusterPlan, ClusterReport
from shoal.fields.kinds import KindHere, method_of
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Clusters of the table.
_SHOWN = 8


@part
class ClusterKind(KindHere):
    """Group the objects of a file around k of themselves."""

    summary: ClassVar = "group objects around medoids"
    job_type: ClassVar = ClusterJob
    plan_type: ClassVar = ClusterPlan
    report_type: ClassVar = ClusterReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "photos:600", "k": 6}
    flags: ClassVar = (
        Flag(name="k", path="k", help="Number of clusters."),
        Flag(
            name="metric",
            path="metric",
            help="euclidean, cosine, any of scikit-learn, or precomputed.",
        ),
        Flag(name="method", path="method", help="How medoids are found, such as fasterpam."),
        Flag(name="init", path="init", help="Initialization: random, build or lab."),
        Flag(name="threads", path="threads", help="Threads that compare candidates with medoids."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("read_s", "time to read"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity.of_share("excess", "loss above FasterPAM's, assumed", "lower"),
        Quantity(name="loss", label="loss", better="lower"),
        Quantity(name="swaps", label="swaps"),
        Quantity(name="passes", label="passes"),
    )

    def plan(self, job: ClusterJob, machine: Machine) -> Sequence[ClusterPlan]:
        """Every method in every way it offers that fits, ranked by time and loss."""
        from shoal.fields.data.cluster.planning import plan_cluster

        return plan_cluster(job, machine)

    def work(self, plan: ClusterPlan) -> Callable[[RunProgress], RunOutcome]:
        """Cluster in this process."""
        from shoal.fields.data.cluster.execute import execute

        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: ClusterPlan) -> str:
        """The method with its options, and how much worse its loss is expected to be."""
        excess = plan.predicted.get("excess")
        worse = "" if excess is None or excess.value < 5e-4 else f", {100 * excess.value:+.1f} %"
        return f"{plan.job.method or 'no method'}{worse}"

    def results(self, report: ClusterReport, directory: Path) -> Sequence[Table | str]:
        """The largest clusters, and where labels and medoids lie."""
        sizes: list[int] = report.details.get("sizes", [])
        medoids: list[int] = report.details.get("medoids", [])
        order = sorted(range(len(sizes)), key=lambda place: -sizes[place])[:_SHOWN]
        largest = Table(
            title=f"the largest of {len(sizes)} clusters",
            columns=("cluster", "medoid", "objects"),
            rows=tuple((str(at), str(medoids[at]), f"{sizes[at]:,}") for at in order),
            right="rrr",
        )
        lines = [
            f"labels:  {directory / 'labels.parquet'}",
            f"medoids: {directory / 'medoids.json'}",
            f"map:     {directory / 'map.svg'}, sizes: {directory / 'clusters.svg'}",
        ]
        if not report.details.get("converged", True):
            lines.append("the search stopped at its limit")
        return [largest, *lines]
