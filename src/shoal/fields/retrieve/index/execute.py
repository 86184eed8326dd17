"""An index from a plan to a report: build, choose the effort, measure, draw the front."""

from __future__ import annotations

from dataclasses import asdict

from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.core.svg import Chart, Series
from shoal.fields.rates import timed_call
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.inputs import read
from shoal.fields.retrieve.index.job import IndexJob
from shoal.fields.retrieve.index.measuring import FrontPoint, front, measured
from shoal.fields.retrieve.index.protocols import Hits, VectorIndex
from shoal.fields.running import RunOutcome, RunProgress


def execute(job: IndexJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Build an index and measure it.

    The effort is the first that finds the wanted share for one half of the queries; recall and
    time are those of the other half.

    Raises:
        ShoalError: the vectors cannot be read or indexed.
    """
    progress.say(0.0, "reading")
    data = read(job)
    method: VectorIndex = table("vector_index").build(choice, where="method")
    half = max(1, len(data.queries) // 2)
    progress.say(0.05, "finding the true neighbours")
    truth = exact_neighbours(data.vectors, data.queries, job.k, job.metric)
    tuning, judging = (
        Hits(ids=truth.ids[part], distances=truth.distances[part], stats={})
        for part in (slice(half), slice(half, None))
    )
    progress.say(0.2, f"building {choice.name}")
    build_s, index = timed_call(
        lambda: method.build(data.vectors, job.metric, seed=job.seed, threads=job.threads)
    )
    progress.say(0.7, "searching")
    points = front(index, method.efforts, data.queries[:half], tuning, job.recall)
    # A single query is both halves.
    rest = (data.queries[half:], judging) if len(data.queries) > half else (data.queries, truth)
    result = measured(index, *rest, points[-1].effort)
    files = index.save(progress.directory)
    shown = [{**asdict(one), "per_s": 1 / one.query_s} for one in points]
    write_json(progress.directory / "front.json", shown)
    write_atomic(progress.directory / "front.svg", _picture(job, choice, points))
    size = index.memory()
    return RunOutcome(
        measured={
            "query_s": result.query_s,
            "p95_s": result.p95_s,
            "recall": result.recall,
            "build_s": build_s,
            "index_bytes": float(sum(size.values())),
        },
        details={
            "front": shown,
            "files": list(files),
            "bytes": dict(size),
            "effort": result.effort,
        },
    )


def _picture(job: IndexJob, choice: Choice, points: list[FrontPoint]) -> str:
    """Queries in a second over recall, as ann-benchmarks draws them."""
    series = Series(
        name=choice.name,
        x=[one.recall for one in points],
        y=[1 / one.query_s for one in points],
        line=True,
        points=True,
    )
    return Chart(
        title=f"queries in a second over recall@{job.k}",
        description=f"{choice.name} with rising effort; up and to the right is better",
        x_label=f"recall@{job.k}",
        y_label="queries/s",
        series=[series],
        log_y=True,
    ).render()
