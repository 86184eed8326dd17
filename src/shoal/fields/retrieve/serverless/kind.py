"""The job ``search_functions``: vectors searched by functions that start each other as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere
from shoal.fields.retrieve.serverless.job import (
    SearchFunctionsJob,
    SearchFunctionsPlan,
    SearchFunctionsReport,
)
from shoal.ir import Flag, Quantity


@part
class SearchFunctionsKind(KindHere):
    """Search vectors by a tree of short-lived functions, and what that costs."""

    summary: ClassVar = "search vectors by a tree of serverless functions"
    job_type: ClassVar = SearchFunctionsJob
    plan_type: ClassVar = SearchFunctionsPlan
    report_type: ClassVar = SearchFunctionsReport
    planner: ClassVar = "shoal.fields.retrieve.serverless.planning:plan_functions"
    executor: ClassVar = "shoal.fields.retrieve.serverless.execute:execute"
    chooses: ClassVar = "backend"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "photos:2000", "queries": 20, "parts": 2, "tree": "2x1"}
    flags: ClassVar = (
        Flag(name="backend", path="backend", help="in_process, processes, http or ray."),
        Flag(name="tree", path="tree", help="Allocators, such as 4x3 for 84 of them."),
        Flag(name="parts", path="parts", help="Parts of the vectors, a function for each."),
        Flag(name="k", path="k", help="Neighbours of a query."),
        Flag(name="queries", path="queries", help="Query vectors, searched in one batch."),
        Flag(name="selectivity", path="selectivity", help="Share of the vectors that pass."),
        Flag(name="latency", path="latency_s", help="Emulated seconds of a dispatch."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="batch_s", label="time of a batch", unit="s", better="lower", headline=True),
        Quantity.of_time("cold_s", "time of the first batch"),
        Quantity(name="usd_per_1000", label="price of 1,000 queries", unit="USD", better="lower"),
        Quantity(name="calls", label="calls of a batch", better="lower"),
        Quantity.of_share("recall", "recall", "higher"),
        Quantity.of_bytes("read_bytes", "index read by the second batch"),
        Quantity.of_bytes("index_bytes", "index"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def describe(self, plan: SearchFunctionsPlan) -> str:
        return f"{plan.job.backend}, tree {plan.job.tree}"

    def results(self, report: SearchFunctionsReport, directory: Path) -> Sequence[Table | str]:
        table = Table(
            title=f"batches of {report.plan.job.queries} queries",
            columns=("batch", "seconds", "calls", "cold", "index read", "USD per 1,000"),
            rows=tuple(
                (
                    str(at), f"{one['seconds']:.3f}", f"{one['calls']:,}", f"{one['cold']:,}",
                    f"{one['read_bytes']:,}", f"{one['usd_per_1000']:.5f}",
                )
                for at, one in enumerate(report.details.get("batches", []))
            ),
            right="rrrrrr",
        )  # fmt: skip
        return [table, f"index: {directory / 'osq'}", f"bills: {directory / 'bills.json'}"]
