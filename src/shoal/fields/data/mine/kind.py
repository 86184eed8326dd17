"""The job ``mine``: find sets of items that occur together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.mine.job import MineJob, MinePlan, MineReport
from shoal.fields.kinds import KindHere, method_of, unreadable_rows
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class MineKind(KindHere):
    """Find frequent sets of items, and rules, in baskets."""

    summary: ClassVar = "find sets of items that occur together, and rules"
    job_type: ClassVar = MineJob
    plan_type: ClassVar = MinePlan
    report_type: ClassVar = MineReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "baskets:400:8", "min_support": 0.1}
    flags: ClassVar = (
        Flag(
            name="min_support",
            path="min_support",
            help="Share of the baskets, such as 0.05, or their number, such as 20.",
        ),
        Flag(name="target", path="target", help="all, closed or maximal."),
        Flag(name="max_len", path="max_len", help="Maximum items per set."),
        Flag(name="min_confidence", path="min_confidence", help="Find rules of this confidence."),
        Flag(name="method", path="method", help="How sets are found: apriori, eclat, fpgrowth."),
        Flag(name="workers", path="workers", help="Shards processed at the same time."),
        Flag(name="pool", path="pool", help="Where shards are processed: local or ray."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("read_s", "time to read"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="itemsets", label="sets"),
        Quantity(name="rules", label="rules"),
    )

    def plan(self, job: MineJob, machine: Machine) -> Sequence[MinePlan]:
        """Every miner that fits, the fastest first."""
        from shoal.fields.data.mine.planning import plan_mine

        return plan_mine(job, machine)

    def work(self, plan: MinePlan) -> Callable[[RunProgress], RunOutcome]:
        """Mine, in this process or shard by shard in a pool."""
        from shoal.fields.data.mine.execute import execute

        require_extra("pyarrow", purpose="writing tables")
        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: MinePlan) -> str:
        """The miner with its options."""
        return str(plan.job.method or "no method")

    def results(self, report: MineReport, directory: Path) -> Sequence[Table | str]:
        """Sets by length, the most frequent pairs, and where all of them lie."""
        lengths: list[int] = report.details.get("lengths", [])
        top: list[list[str]] = report.details.get("top", [])
        tables = [
            Table(
                title="sets by their number of items",
                columns=("items", "sets"),
                rows=tuple((str(length + 1), f"{count:,}") for length, count in enumerate(lengths)),
                right="rr",
            ),
            Table(
                title="the most frequent of two items and more",
                columns=("set", "baskets"),
                rows=tuple((items, count) for items, count in top),
                right=".r",
            ),
        ]
        lines = [f"sets:    {directory / 'itemsets.parquet'}"]
        if "rules" in report.measured:
            lines.append(f"rules:   {directory / 'rules.parquet'}")
        lines.append(f"picture: {directory / 'itemsets.svg'}")
        return [*tables, *lines, *unreadable_rows(report.details)]
