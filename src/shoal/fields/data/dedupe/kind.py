"""The job ``dedupe``: remove duplicate documents, and find tables that others contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.data.dedupe.job import DedupeJob, DedupePlan, DedupeReport
from shoal.fields.kinds import KindHere, method_of
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Characters of an example.
_WIDTH = 28


@part
class DedupeKind(KindHere):
    """Find duplicates among rows of text or among tables, and keep one of each."""

    summary: ClassVar = "remove duplicate documents, find contained tables"
    job_type: ClassVar = DedupeJob
    plan_type: ClassVar = DedupePlan
    report_type: ClassVar = DedupeReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "stdlib"}
    flags: ClassVar = (
        Flag(name="method", path="method", help="How duplicates are found, such as minhash."),
        Flag(name="threshold", path="threshold", help="Jaccard similarity of duplicates."),
        Flag(name="compared", path="compared", help="rows (documents) or tables (files)."),
        Flag(name="unit", path="unit", help="A shingle is a run of words or of characters."),
        Flag(name="ngram", path="ngram", help="Units of a shingle."),
        Flag(name="workers", path="workers", help="Shards processed at the same time."),
        Flag(name="pool", path="pool", help="Where shards are processed: local or ray."),
        Flag(name="seed", path="seed", help="Seed of the hash functions."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity(name="bytes_per_s", label="rate", unit="MB/s", factor=1e-6, better="higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity.of_share("finds", "pairs at the threshold found", "higher"),
        Quantity(name="rows", label="rows or tables"),
        Quantity.of_share("kept_share", "kept", "higher"),
        Quantity(name="compared_pairs", label="pairs compared"),
    )

    def plan(self, job: DedupeJob, machine: Machine) -> Sequence[DedupePlan]:
        """Every method for such data in every way it offers that fits."""
        from shoal.fields.data.dedupe.planning import plan_dedupe

        return plan_dedupe(job, machine)

    def work(self, plan: DedupePlan) -> Callable[[RunProgress], RunOutcome]:
        """Find duplicates, in this process or in a pool."""
        from shoal.fields.data.dedupe.execute import execute

        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: DedupePlan) -> str:
        """The method with its options, and the share of pairs at the threshold that it finds."""
        finds = plan.predicted.get("finds")
        share = "" if finds is None else f", finds {100 * finds.value:.0f} % at the threshold"
        return f"{plan.job.method or 'no method'}{share}"

    def results(self, report: DedupeReport, directory: Path) -> Sequence[Table | str]:
        """Duplicates side by side, the sizes of clusters, and what lies where."""
        details = report.details
        examples = Table(
            title="duplicates side by side",
            columns=("kept", "dropped", "why"),
            rows=tuple(
                (_short(kept), _short(dropped), why)
                for kept, dropped, why in details.get("examples", [])
            ),
            right="...",
        )
        sizes = Table(
            title=f"{details.get('clusters', 0):,} clusters of duplicates",
            columns=("members", "clusters"),
            rows=tuple((f"{size:,}", f"{count:,}") for size, count in details.get("sizes", [])),
            right="rr",
        )
        lines = [f"{what}: {directory / name}" for name, what in details.get("files", {}).items()]
        if details.get("bad_rows"):
            lines.append(
                f"{details['bad_rows']:,} could not be read, the first: {details['first_bad']}"
            )
        return [table for table in (examples, sizes) if table.rows] + lines


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
