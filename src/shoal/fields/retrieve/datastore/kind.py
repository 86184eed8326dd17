"""The job ``datastore``: passages to look up, and what more of them are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere
from shoal.fields.retrieve.datastore.job import DatastoreJob, DatastorePlan, DatastoreReport
from shoal.ir import Flag, Quantity


@part
class DatastoreKind(KindHere):
    """Build a datastore, and measure perplexity over its size."""

    summary: ClassVar = "build a datastore of passages, and measure perplexity over its size"
    job_type: ClassVar = DatastoreJob
    plan_type: ClassVar = DatastorePlan
    report_type: ClassVar = DatastoreReport
    planner: ClassVar = "shoal.fields.retrieve.datastore.planning:plan_datastore"
    executor: ClassVar = "shoal.fields.retrieve.datastore.execute:execute"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "stdlib"}
    flags: ClassVar = (
        Flag(name="store", path="store", help="An existing datastore, instead of a new one."),
        Flag(
            name="heldout", path="heldout", help="Text on which perplexity is measured; not stored."
        ),
        Flag(
            name="pattern", path="pattern", help="Pattern of file names, such as '*.md'.", read=str
        ),
        Flag(name="method", path="method", help="How passages are found: bm25 or dense."),
        Flag(name="readers", path="readers", help="Models whose perplexity is measured."),
        Flag(name="windows", path="windows", help="Windows of held-out text that are scored."),
        Flag(name="k", path="k", help="Passages put in front of a window."),
        Flag(name="pool", path="pool", help="Where shards are built: local or ray."),
        Flag(name="workers", path="workers", help="Shards processed at the same time."),
        Flag(name="threads", path="threads", help="Threads for building, searching, reading."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("build_s", "  to build"),
        Quantity.of_time("sweep_s", "  for all sizes, samples and filters"),
        Quantity.of_time("read_s", "  of the readers"),
        Quantity.of_time("query_s", "search of a query", "ms"),
        Quantity.of_bytes("index_bytes", "index and map"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity(name="passages", label="passages"),
        Quantity(name="bare_perplexity", label="perplexity without passages", better="lower"),
        Quantity(name="perplexity", label="perplexity with the whole datastore", better="lower"),
    )

    def results(self, report: DatastoreReport, directory: Path) -> Sequence[Table | str]:
        """Perplexity by size, the law of each reader, the front, and what lies where."""
        details = report.details
        curve = Table(
            title="perplexity by size of the datastore, a mean over samples",
            columns=("reader", "filters", "tokens", "perplexity"),
            rows=tuple(
                (one["reader"], one["filters"], f"{one['tokens']:,.0f}", f"{one['perplexity']:.3f}")
                for one in details.get("curve", [])
            ),
            right="..rr",
        )
        front = Table(
            title="front over the FLOPs of training a reader",
            columns=("FLOPs", "reader", "tokens", "perplexity"),
            rows=tuple(
                (f"{one['flops']:.3g}", one["reader"], f"{one['tokens']:,.0f}",
                 f"{one['perplexity']:.3f}")
                for one in details.get("front", [])
            ),
            right="r.rr",
        )  # fmt: skip
        lines = [str(line) for line in details.get("laws", {}).values()]
        dropped = details.get("dropped", {})
        words = ", ".join(f"{count:,} {why}" for why, count in dropped.items()) or "none"
        lines.append(
            f"{details.get('overlap', 0):.1%} of the queries found a passage that repeats the "
            f"held-out text; dropped: {words}"
        )
        lines += [f"{what}: {directory / name}" for name, what in details.get("files", {}).items()]
        return [table for table in (curve, front) if table.rows] + lines
