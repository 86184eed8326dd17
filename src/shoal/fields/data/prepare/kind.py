"""The job ``prepare``: profile a table, and make it ready for analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table, cut
from shoal.fields.data.prepare.job import PrepareJob, PreparePlan, PrepareReport
from shoal.fields.kinds import KindHere, unreadable_rows
from shoal.ir import Flag, Machine, Quantity
from shoal.ir.job_kind import predicted_table

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Characters of a measurement, and columns of a profile, that 80 columns hold; -v shows the rest.
_WIDTH = 44
_BRIEF = ("column", "kind", "missing", "distinct", "mean", "std", "50 %", "example")


@part
class PrepareKind(KindHere):
    """Clean, encode and scale a table, by steps that its profile asks for."""

    summary: ClassVar = "profile a table, choose steps with reasons, prepare it"
    job_type: ClassVar = PrepareJob
    plan_type: ClassVar = PreparePlan
    report_type: ClassVar = PrepareReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "dirty:400", "target": "y"}
    flags: ClassVar = (
        Flag(name="target", path="target", help="Column to predict."),
        Flag(name="holdout", path="holdout", help="Share of rows held out from all steps."),
        Flag(name="workers", path="workers", help="Shards processed at the same time."),
        Flag(name="pool", path="pool", help="Where shards are processed: local or ray."),
        Flag(name="seed", path="seed", help="Seed of held-out rows, folds and samples."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("fit_s", "  of it to fit"),
        Quantity(name="bytes_per_s", label="rate", unit="MB/s", factor=1e-6, better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="rows", label="rows"),
        Quantity(name="rows_prepared", label="rows prepared"),
        Quantity(name="columns_prepared", label="columns prepared"),
    )

    def plan(self, job: PrepareJob, machine: Machine) -> Sequence[PreparePlan]:
        """What the guide proposes, and the defaults."""
        from shoal.fields.data.prepare.planning import plan_prepare

        return plan_prepare(job, machine)

    def work(self, plan: PreparePlan) -> Callable[[RunProgress], RunOutcome]:
        """Fit and transform, in this process or in a pool."""
        from shoal.fields.data.prepare.execute import execute

        return partial(execute, plan)

    def describe(self, plan: PreparePlan) -> str:
        """The steps in order."""
        steps = ", ".join(one.name for one in plan.job.steps or ())
        return f"{plan.planner or 'steps'}: {steps or 'nothing to do'}"

    def tables(
        self, plans: Sequence[PreparePlan], *, verbose: bool = False
    ) -> Sequence[Table | str]:
        """The best plan's steps with their reasons, its prediction, and the profile."""
        from shoal.fields.data.prepare.execute import steps_table

        best = plans[0]
        steps = steps_table(best)
        profile = [best.profile.table("profile")] if best.profile is not None else []
        if not verbose:
            rows = tuple((*row[:2], cut(row[2], _WIDTH), *row[3:]) for row in steps.rows)
            steps = steps.model_copy(update={"rows": rows}).only("", "step", "measured", "time")
            profile = [one.only(*_BRIEF) for one in profile]
        title = f"{best.planner} on {best.machine.name}"
        predicted = predicted_table(title, self.quantities, best.predicted)
        others = [f"instead: {self.describe(plan)}" for plan in plans[1:]]
        notes = map("note: {}".format, best.notes)
        return [*profile, steps, predicted, best.why, *others, *notes]

    def results(self, report: PrepareReport, directory: Path) -> Sequence[Table | str]:
        """The profile after, and what lies where."""
        from shoal.fields.data.prepare.profile import TableProfile

        after = TableProfile.model_validate(report.details["after"])
        lines = [f"rows:     {directory / 'prepared'}"]
        if report.details.get("held_out"):
            lines.append(f"held out: {directory / 'held_out'}")
        lines.append(f"learned:  {directory / 'pipeline.json'}")
        lines.append(f"picture:  {directory / 'profile.html'}")
        return [after.table("after").only(*_BRIEF), *lines, *unreadable_rows(report.details)]
