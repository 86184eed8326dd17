"""The job ``search``: serve collections of points over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere, method_of
from shoal.fields.retrieve.search.job import SearchJob, SearchPlan, SearchReport
from shoal.ir import Flag, Quantity, Watch

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class SearchKind(KindHere):
    """Serve collections of points, or measure how fast documents are searched over HTTP."""

    summary: ClassVar = "serve collections of points, found by vectors and words"
    job_type: ClassVar = SearchJob
    plan_type: ClassVar = SearchPlan
    report_type: ClassVar = SearchReport
    planner: ClassVar = "shoal.fields.retrieve.search.planning:plan_search"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "collections", "points": 2000, "dim": 32}
    flags: ClassVar = (
        Flag(name="load", path="documents", help="Documents to load a server with, and to search."),
        Flag(name="points", path="points", help="Points of the collection."),
        Flag(name="dim", path="dim", help="Dimensions of a vector."),
        Flag(name="embedder", path="embedder", help="Model that makes vectors of texts."),
        Flag(name="method", path="method", help="dense, bm25 or hybrid."),
        Flag(name="clients", path="clients", help="Concurrent clients of the load."),
        Flag(name="host", path="host", help="Address to listen on."),
        Flag(name="port", path="port", help="Port to listen on; 0 for any free port."),
        Flag(name="keys", path="keys", help="File of API keys and their tenants."),
    )
    quantities: ClassVar = (
        Quantity(name="queries_per_s", label="queries per second", better="higher", headline=True),
        Quantity.of_time("query_p50_s", "latency of a query, median", "ms"),
        Quantity.of_time("query_p99_s", "  99 % within", "ms"),
        Quantity(name="upserts_per_s", label="points added per second", better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def work(self, plan: SearchPlan) -> Callable[[RunProgress], RunOutcome]:
        """Serve, or load and measure, in this process."""
        from shoal.fields.retrieve.search.execute import prepared

        return prepared(plan.job, method_of(plan))

    def run(
        self,
        plan: SearchPlan,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> Any:
        """As the others; a server that was stopped is started again by ``resume``.

        A server has as many points as its users bring, so what was planned for another number of
        them is not scored.
        """
        if not plan.job.documents:
            plan = plan.model_copy(update={"predicted": {}})
            if resume:
                (directory / "report.json").unlink(missing_ok=True)
        return super().run(plan, directory, resume=resume, watch=watch, anyway=anyway)

    def results(self, report: SearchReport, directory: Path) -> Sequence[Table | str]:
        details = report.details
        lines = [f"queries: {details.get('queries', 0):,}"]
        if "server_p50_s" in details:
            lines.append(
                f"in the server: median {details['server_p50_s'] * 1e3:.2f} ms, 99 % within "
                f"{details['server_p99_s'] * 1e3:.2f} ms"
            )
        return lines
