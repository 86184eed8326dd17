"""A preparation from a plan to prepared rows."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.files import write_atomic
from shoal.core.tables import Table, digits, html
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.job import PreparePlan
from shoal.fields.data.prepare.passes import HELD_OUT, PREPARED, Passes
from shoal.fields.data.prepare.pipeline import FittedStep, PrepPipeline, build_steps, fit, passes_of
from shoal.fields.data.prepare.planning import table_of
from shoal.fields.data.prepare.profile import profile_of
from shoal.fields.data.readers import BadRowCount
from shoal.fields.data.shards import opened
from shoal.fields.running import RunOutcome, RunProgress
from shoal.ir import Quantity

_PIPELINE = "pipeline.json"


def execute(plan: PreparePlan, progress: RunProgress) -> RunOutcome:
    """Fit the steps, write ``prepared/*.parquet``, ``pipeline.json`` and ``profile.html``.

    Raises:
        ShoalError: the data cannot be read, or a step cannot work on them.
    """
    job, bad = plan.job, BadRowCount()
    progress.say(0.0, "reading")
    if job.steps is None:
        raise PrepareError("steps: the plan has none; make one with shoal plan prepare --out")
    steps, rows = build_steps(job.steps), table_of(job)
    shards, path = rows.shards(bad), progress.directory / _PIPELINE
    total, done_before = passes_of(steps) + 1, 0

    def tick(done: int, of: int, text: str) -> None:
        share = min((done_before + done / max(of, 1)) / total, 0.99)
        progress.tick(share, f"{text}: shard {done} of {of}", {"done": share})

    pipeline = PrepPipeline(steps, job.target)
    begin: list[FittedStep] = PrepPipeline.load(path).fitted if path.exists() else []

    def keep(fitted: Sequence[FittedStep]) -> None:
        nonlocal done_before
        done_before += 1
        pipeline.fitted = list(fitted)
        pipeline.save(path)

    with opened(job.pool) as pool:
        passes = Passes(shards, progress.directory / "shards", pool, job.workers, tick)
        fitted = fit(steps, passes.gather, rows.nothing(), begin, keep)
        fit_s = progress.seconds
        done_before = total - 1
        counts, sketches, more = passes.write(fitted)
    bad.add(more.first, more.rows)
    seconds, after = progress.seconds, profile_of(sketches)
    if not counts["rows"]:
        raise PrepareError(f"data = {job.data!r}: no rows; give a table with some")
    if not counts[PREPARED]:
        raise PrepareError(
            f"steps: of {counts['rows']:,} rows none is left; leave out columns that are mostly "
            "missing, or fill them with the step impute"
        )
    if not after.columns:
        raise PrepareError("steps: no column is left; none carries anything")
    page = [steps_table(plan)]
    if plan.profile is not None:
        page.append(plan.profile.table("before", most=1000))
    page.append(after.table("after", most=1000))
    body = "\n".join(map(html, page))
    title = f"<!doctype html><meta charset='utf-8'><title>{job.name}: profile</title>\n"
    write_atomic(progress.directory / "profile.html", title + body)
    return RunOutcome(
        measured={
            "total_s": seconds,
            "fit_s": fit_s,
            "bytes_per_s": rows.num_bytes / max(seconds, 1e-9),
            "rows": float(counts["rows"]),
            "rows_prepared": float(counts[PREPARED] + counts[HELD_OUT]),
            "columns_prepared": float(len(after.columns)),
        },
        details={
            "after": after.model_dump(mode="json"),
            "held_out": counts[HELD_OUT],
            "bad_rows": bad.rows,
            "first_bad": bad.first,
        },
    )


def steps_table(plan: PreparePlan) -> Table:
    """The steps in order, with measurement, rule and price."""
    quantity = Quantity.of_time("step_s", "time")
    one_unit = quantity.scaled_to(max((one.seconds for one in plan.reasons), default=0.0))
    rows = [
        (
            str(number + 1),
            one.step.partition("(")[0],
            one.reason.measured,
            one.reason.rule,
            one_unit.text(one.seconds),
            f"{digits(one.memory_bytes / 2**20)} MiB",
        )
        for number, one in enumerate(plan.reasons)
    ]
    return Table(
        title="steps",
        columns=("", "step", "measured", "rule", "time", "memory"),
        rows=tuple(rows),
        right="r   rr",
    )
