"""A curation from a plan to what was kept."""

from __future__ import annotations

from shoal.core.bars import StackedBars
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.curate.effect import effect_of
from shoal.fields.data.curate.job import CurateJob
from shoal.fields.data.curate.planning import source_of, text_column
from shoal.fields.data.curate.protocols import CurateProblem, Curation
from shoal.fields.data.shards import opened
from shoal.fields.running import RunOutcome, RunProgress


def execute(job: CurateJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Curate; the rows that are kept lie in ``kept``, and ``stages.json`` has what was dropped.

    Raises:
        ShoalError: the data cannot be read, or not be curated like that.
    """
    progress.say(0.0, "reading")
    source = source_of(job)
    method = table("curator").build(choice, where="method")
    with opened(job.pool) as pool:
        problem = CurateProblem(
            source=source,
            text=text_column(source, job),
            columns=job.columns,
            keep=job.keep,
            place=progress.directory,
            pool=pool,
            workers=job.workers,
            seed=job.seed,
            tick=lambda done, text: progress.tick(done, text, {"done": done}),
        )
        result = method.curate(problem)
    seconds = progress.seconds
    stages = [stage._asdict() for stage in result.stages]
    write_json(progress.directory / "stages.json", stages)
    if stages:
        write_atomic(progress.directory / "stages.svg", _lineage(result).render())
    details = dict(result.details)
    if job.effect is not None:
        details["effect"] = effect_of(method, problem, job.effect, progress.say)
    return RunOutcome(
        measured={
            "total_s": seconds,
            "bytes_per_s": source.num_bytes / max(seconds, 1e-9),
            "rows": float(result.rows),
            "kept_share": result.kept / max(result.rows, 1),
            **result.measured,
        },
        details={
            "stages": stages,
            "bad_rows": result.bad,
            "first_bad": result.first_bad,
            **details,
        },
    )


def _lineage(result: Curation) -> StackedBars:
    """From all rows to those that were kept, a bar for each stage."""
    bars = {
        f"{stage.name}: {stage.rows:,}": {
            "go on": float(stage.rows - stage.dropped),
            "dropped": float(stage.dropped),
        }
        for stage in result.stages
    }
    bars[f"kept: {result.kept:,}"] = {"go on": float(result.kept)}
    return StackedBars("rows that each stage was given", bars, lambda value: f"{value:,.0f}")
