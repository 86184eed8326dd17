"""A deduplication from a plan to what was kept."""

from __future__ import annotations

from shoal.core.bars import StackedBars
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.dedupe.job import DedupeJob
from shoal.fields.data.dedupe.planning import source_of, text_columns
from shoal.fields.data.dedupe.protocols import DedupeProblem, Deduper, Deduplication
from shoal.fields.data.shards import opened
from shoal.fields.running import RunOutcome, RunProgress

# Bars of the picture.
_SHOWN = 16


def execute(job: DedupeJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Find duplicates; ``clusters.parquet`` says what was kept.

    Raises:
        ShoalError: the data cannot be read, or not be compared like that.
    """
    progress.say(0.0, "reading")
    method: Deduper = table("deduper").build(choice, where="method")
    source = source_of(job) if method.compared == "rows" else None
    with opened(None if source is None else job.pool) as pool:
        problem = DedupeProblem(
            where=job.data,
            source=source,
            texts=text_columns(source, job) if source is not None else (),
            threshold=job.threshold,
            unit=job.unit,
            ngram=job.ngram,
            place=progress.directory,
            pool=pool,
            workers=job.workers,
            seed=job.seed,
            tick=lambda done, text: progress.tick(done, text, {"done": done}),
        )
        result = method.dedupe(problem)
    seconds = progress.seconds
    files = {**result.files, "duplicates.json": "examples"}
    examples = [list(one) for one in result.examples]
    write_json(progress.directory / "duplicates.json", examples)
    if result.sizes:
        write_atomic(progress.directory / "clusters.svg", _picture(result))
        files["clusters.svg"] = "picture"
    measured = {
        "total_s": seconds,
        "rows": float(result.rows),
        "kept_share": result.kept / max(result.rows, 1),
        **result.measured,
    }
    if source is not None:
        measured["bytes_per_s"] = source.num_bytes / max(seconds, 1e-9)
    return RunOutcome(
        measured=measured,
        details={
            "kept": result.kept,
            "clusters": result.clusters,
            "sizes": [list(one) for one in result.sizes],
            "examples": examples,
            "bad_rows": result.bad,
            "first_bad": result.first_bad,
            "files": files,
            **result.details,
        },
    )


def _picture(result: Deduplication) -> str:
    """Rows by the size of their cluster; the largest sizes together."""
    few, rest = result.sizes[: _SHOWN - 1], result.sizes[_SHOWN - 1 :]
    rows = {
        f"clusters of {size:,}": {"kept": float(count), "dropped": float(count * (size - 1))}
        for size, count in few
    }
    if rest:
        clusters = sum(count for _, count in rest)
        dropped = sum(count * (size - 1) for size, count in rest)
        rows[f"of {rest[0][0]:,} and more"] = {"kept": float(clusters), "dropped": float(dropped)}
    title = f"{result.rows:,} compared, {result.rows - result.kept:,} duplicates"
    return StackedBars(title, rows, lambda value: f"{value:,.0f}").render()
