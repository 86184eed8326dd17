"""The job ``cluster``: group objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    """Group the objects of a file, around medoids or centres."""

    summary: ClassVar = "group objects around medoids or centres"
    job_type: ClassVar = ClusterJob
    plan_type: ClassVar = ClusterPlan
    report_type: ClassVar = ClusterReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "photos:600", "k": 6}
    flags: ClassVar = (
        Flag(name="k", path="k", help="Number of clusters, or auto."),
        Flag(
            name="metric",
            path="metric",
            help="euclidean, cosine, any of scikit-learn, or precomputed.",
        ),
        Flag(
            name="method", path="method", help="How clusters are found, such as fasterpam or ppp."
        ),
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
        Quantity(name="clusters", label="clusters"),
        Quantity.of_share("separable", "objects that are surely in their cluster", "higher"),
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
        """The largest clusters, and where the files lie."""
        details = report.details
        sizes: list[int] = details.get("sizes", [])
        names: list[Any] = details.get("names", details.get("medoids", []))
        files: list[str] = details.get("files", ["medoids.json"])
        order = sorted(range(len(sizes)), key=lambda place: -sizes[place])[:_SHOWN]
        largest = Table(
            title=f"the largest of {len(sizes)} clusters",
            columns=("cluster", details.get("what", "medoid"), "objects"),
            rows=tuple((str(at), str(names[at]), f"{sizes[at]:,}") for at in order),
            right="rrr",
        )
        lines = [
            f"labels:  {directory / 'labels.parquet'}",
            *(f"{name.partition('.')[0] + ':':8} {directory / name}" for name in files),
            f"map:     {directory / 'map.svg'}, sizes: {directory / 'clusters.svg'}",
        ]
        if not details.get("converged", True):
            lines.append("the search stopped at its limit")
        return [largest, *lines]
