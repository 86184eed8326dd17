"""The job ``index``: find the nearest vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere
from shoal.fields.retrieve.index.job import IndexJob, IndexPlan, IndexReport
from shoal.ir import Flag, Quantity


@part
class IndexKind(KindHere):
    """Index vectors, and measure recall against time."""

    summary: ClassVar = "index vectors, and measure recall against time"
    job_type: ClassVar = IndexJob
    plan_type: ClassVar = IndexPlan
    report_type: ClassVar = IndexReport
    planner: ClassVar = "shoal.fields.retrieve.index.planning:plan_index"
    executor: ClassVar = "shoal.fields.retrieve.index.execute:execute"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "photos:2000", "queries": 100}
    flags: ClassVar = (
        Flag(name="k", path="k", help="Neighbours of a query."),
        Flag(name="metric", path="metric", help="l2, ip or cosine."),
        Flag(name="method", path="method", help="The index, such as curator, hnsw or ivf_flat."),
        Flag(name="recall", path="recall", help="Required share of the true neighbours found."),
        Flag(name="threads", path="threads", help="Threads for building and searching."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="query_s", label="time of a query", unit="s", better="lower", headline=True),
        Quantity.of_share("recall", "recall", "higher"),
        Quantity.of_time("build_s", "time to build"),
        Quantity.of_bytes("index_bytes", "index"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity.of_time("p95_s", "slowest of 20 queries"),
    )

    def results(self, report: IndexReport, directory: Path) -> Sequence[Table | str]:
        """Recall and queries in a second by effort, and what lies where."""
        front = report.details.get("front", [])
        table = Table(
            title=f"recall@{report.plan.job.k} by effort",
            columns=("effort", "recall", "queries/s"),
            rows=tuple(
                (f"{one['effort']:g}", f"{one['recall']:.4f}", f"{one['per_s']:,.0f}")
                for one in front
            ),
            right="rrr",
        )
        files = ", ".join(str(directory / name) for name in report.details.get("files", []))
        return [table, f"index:   {files}", f"picture: {directory / 'front.svg'}"]
