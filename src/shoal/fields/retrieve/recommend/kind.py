"""The job ``recommend``: learn what users do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere, method_of
from shoal.fields.retrieve.recommend.job import RecommendJob, RecommendPlan, RecommendReport
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class RecommendKind(KindHere):
    """Learn what users do next from their events, and measure how often it is right."""

    summary: ClassVar = "learn what users do next from their events"
    job_type: ClassVar = RecommendJob
    plan_type: ClassVar = RecommendPlan
    report_type: ClassVar = RecommendReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "streams:200", "dim": 16, "blocks": 1, "length": 32}
    flags: ClassVar = (
        Flag(name="method", path="method", help="The recommender: hstu, sasrec or popular."),
        Flag(name="length", path="length", help="Maximum events per history."),
        Flag(name="dim", path="dim", help="Width of an event's embedding."),
        Flag(name="blocks", path="blocks", help="Layers of the network."),
        Flag(name="epochs", path="epochs", help="Passes over the events."),
        Flag(name="threads", path="threads", help="Threads of the network."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="train_s", label="time to learn", unit="s", better="lower", headline=True),
        Quantity.of_share("hr10", "hits among 10", "higher"),
        Quantity.of_share("ndcg10", "NDCG among 10", "higher"),
        Quantity.of_time("request_s", "time of a request"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: RecommendJob, machine: Machine) -> Sequence[RecommendPlan]:
        """Every recommender, timed in a few steps; networks before counts."""
        from shoal.fields.retrieve.recommend.planning import plan_recommend

        require_extra("torch", purpose="a network of events")
        return plan_recommend(job, machine)

    def work(self, plan: RecommendPlan) -> Callable[[RunProgress], RunOutcome]:
        from shoal.fields.retrieve.recommend.execute import execute

        require_extra("torch", purpose="a network of events")
        return partial(execute, plan.job, method_of(plan))

    def results(self, report: RecommendReport, directory: Path) -> Sequence[Table | str]:
        """Where the recommender lies, and how many events were judged."""
        files = ", ".join(str(directory / name) for name in report.details.get("files", []))
        return [f"tested on {report.details.get('judged', 0):,} events", f"files:  {files}"]
