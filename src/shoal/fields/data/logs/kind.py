"""The job ``parse_logs``: templates of logs, anomalies among their events, and small containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.logs.job import ParseLogsJob, ParseLogsPlan, ParseLogsReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Templates of the table.
_SHOWN = 8


@part
class ParseLogsKind(KindHere):
    """Find the templates of a log; or anomalies; or pack it."""

    summary: ClassVar = "find the templates of logs, and anomalies; or pack them"
    job_type: ClassVar = ParseLogsJob
    plan_type: ClassVar = ParseLogsPlan
    report_type: ClassVar = ParseLogsReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "imports"}
    flags: ClassVar = (
        Flag(name="format", path="format", help="A format of the catalogue, or auto."),
        Flag(name="parser", path="parser", help="How templates are found, such as drain."),
        Flag(name="anomalies", path="anomalies", help="How anomalies are found, such as pca."),
        Flag(name="window", path="window", help="Lines of a group where there are no sessions."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("mine_s", "time to the templates"),
        Quantity(name="bytes_per_s", label="rate", unit="MB/s", factor=1e-6, better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="lines", label="lines"),
        Quantity(name="templates", label="templates"),
        Quantity(name="true_groups", label="true templates"),
        Quantity.of_share("no_header_share", "lines without header", "lower"),
        Quantity.of_share("assumed_accuracy", "grouping accuracy, published", "higher"),
        Quantity.of_share("grouping_accuracy", "grouping accuracy (GA)", "higher"),
        Quantity.of_share("parsing_accuracy", "parsing accuracy (PA)", "higher"),
        Quantity.of_share("group_f1", "F1 of groups (FGA)", "higher"),
        Quantity.of_share("template_f1", "F1 of templates (FTA)", "higher"),
        Quantity(name="groups", label="sessions or windows"),
        Quantity(name="anomalies", label="anomalies"),
        Quantity.of_share("anomaly_f1", "F1 of anomalies", "higher"),
        Quantity.of_share("packed_share", "packed, of the log's bytes", "lower"),
    )

    def plan(self, job: ParseLogsJob, machine: Machine) -> Sequence[ParseLogsPlan]:
        """Every parser that fits, ranked by accuracy and time."""
        from shoal.fields.data.logs.planning import plan_logs

        return plan_logs(job, machine)

    def work(self, plan: ParseLogsPlan) -> Callable[[RunProgress], RunOutcome]:
        """Parse, pack or unpack in this process; a run that was stopped reads the log again."""
        from shoal.fields.data.logs.execute import execute

        return partial(execute, plan)

    def describe(self, plan: ParseLogsPlan) -> str:
        """The parser with its options, and what else is done."""
        if plan.job.pack or plan.job.unpack:
            return "pack" if plan.job.pack else "unpack"
        more = "" if plan.job.anomalies is None else f", anomalies: {plan.job.anomalies}"
        return f"{plan.job.parser or 'no parser'}{more}"

    def results(self, report: ParseLogsReport, directory: Path) -> Sequence[Table | str]:
        """The most frequent templates, and where the files lie."""
        job = report.plan.job
        if job.pack or job.unpack:
            return [f"{'container' if job.pack else 'log'}: {directory / _FILES[job.pack]}"]
        templates = report.details.get("templates", [])[:_SHOWN]
        lines = [
            f"events:    {directory / 'events.parquet'}",
            f"templates: {directory / 'templates.csv'}",
            f"picture:   {directory / 'templates.svg'}",
        ]
        if job.anomalies is not None:
            lines.append(f"anomalies: {directory / 'anomalies.csv'}")
        without = report.measured.get("no_header_share", 0.0)
        if without:
            lines.append(
                f"{100 * without:.2g} % of the lines have no header of the format "
                f"{report.details['format']}; all of such a line is its content; the first: "
                f"{report.details['first_without_header']}"
            )
        if report.details.get("truth"):
            lines.append(report.details["truth"])
        if report.details.get("bad_lines"):
            lines.append(f"{report.details['bad_lines']} lines were too long to be read")
        shown = Table(
            title="the most frequent templates",
            columns=("lines", "template"),
            rows=tuple((f"{count:,}", text) for text, count in templates),
            right="r.",
        )
        return [shown, *lines]


_FILES = {True: "log.packed", False: "unpacked.log"}
