"""The job ``curate``: choose the rows that a model should see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.curate.job import CurateJob, CuratePlan, CurateReport
from shoal.ir import Flag, Interval, Machine, Quantity, Watch


@part
class CurateKind:
    """Choose the rows of a data set for a model."""

    summary: ClassVar = "choose the rows that a model should see"
    job_type: ClassVar = CurateJob
    plan_type: ClassVar = CuratePlan
    report_type: ClassVar = CurateReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "stdlib"}
    flags: ClassVar = (
        Flag(name="method", path="method", help="How rows are chosen, such as random."),
        Flag(name="keep", path="keep", help="Share of the rows that is kept."),
        Flag(name="workers", path="workers", help="Shards that are in work at a time."),
        Flag(name="pool", path="pool", help="Where shards are processed: local or ray."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity(name="bytes_per_s", label="rate", unit="MB/s", factor=1e-6, better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="rows", label="rows"),
        Quantity.of_share("kept_share", "rows kept", "higher"),
    )

    def plan(self, job: CurateJob, machine: Machine) -> Sequence[CuratePlan]:
        """Every method for such data in every way it offers that fits."""
        from shoal.fields.data.curate.planning import plan_curate

        return plan_curate(job, machine)

    def run(
        self,
        plan: CuratePlan,
        directory: Path,
        *,
        resume: bool = False,
        watch: Watch | None = None,
        anyway: bool = False,
    ) -> CurateReport:
        """Curate, in this process or in a pool."""
        from shoal.fields.data.curate.execute import execute, method_of
        from shoal.fields.running import run_here

        work = partial(execute, plan.job, method_of(plan))
        report = run_here(plan, directory, work, resume=resume, watch=watch, anyway=anyway)
        return cast(CurateReport, report)

    def report(self, plan: CuratePlan, directory: Path) -> CurateReport:
        """None before the end."""
        from shoal.fields.running import report_at_end

        return cast(CurateReport, report_at_end(plan, directory))

    def predictions(self, plan: CuratePlan) -> Mapping[str, Interval]:
        """Time, rate, memory."""
        return plan.predicted

    def describe(self, plan: CuratePlan) -> str:
        """The method with its options."""
        return str(plan.job.method or "no method")

    def results(self, report: CurateReport, directory: Path) -> Sequence[Table | str]:
        """What each stage dropped, and where the rows are that were kept."""
        stages = Table(
            title="what was dropped",
            columns=("stage", "rows", "dropped", "share"),
            rows=tuple(
                (
                    stage["name"],
                    f"{stage['rows']:,}",
                    f"{stage['dropped']:,}",
                    f"{100 * stage['dropped'] / max(stage['rows'], 1):.1f} %",
                )
                for stage in report.details.get("stages", [])
            ),
            right=".rrr",
        )
        lines = [f"kept: {directory / 'kept'}/*.parquet", f"why:  {directory / 'stages.json'}"]
        if report.details.get("bad_rows"):
            lines.append(
                f"{report.details['bad_rows']:,} rows could not be read, the first: "
                f"{report.details['first_bad']}"
            )
        return [stages, *lines]
