"""Plans of a deduplication: every method in every way that it offers, ranked."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import DataError, PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.corpora.files import find_files
from shoal.fields.data.dedupe.costs import rates_of
from shoal.fields.data.dedupe.job import DedupeJob, DedupePlan
from shoal.fields.data.dedupe.protocols import Compared, Deduper, DedupeWork
from shoal.fields.data.readers import arrow
from shoal.fields.data.row_rates import RowRates, row_rates
from shoal.fields.data.sources import Source, open_source
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow.
_RUNTIME = 2.5e8
# Bytes of a row, as stored, where only reading would tell how many there are.
_ROW_BYTES = 1000.0
# A method that finds this much less of the pairs at the threshold comes after the others.
_WORSE = 0.25


def source_of(job: DedupeJob) -> Source:
    """The rows of a job.

    Raises:
        DataError: they cannot be read.
    """
    return open_source(job.data, bad=job.bad)


def text_columns(source: Source, job: DedupeJob) -> tuple[str, ...]:
    """The columns of text that are compared: those that are named, ``text``, or the only one.

    Raises:
        DataError: a column is missing, or is no text; or none was named, and several could be.
    """
    schema, types = source.schema, arrow("types")
    strings = [
        one.name for one in schema if types.is_string(one.type) or types.is_large_string(one.type)
    ]
    for name in job.columns:
        if name not in strings:
            what = schema.field(name).type if name in schema.names else "missing"
            raise DataError(
                f"data = {job.data!r}: column {name!r} is {what}, not text; columns of text: "
                + (", ".join(strings) or "none")
            )
    if job.columns:
        return job.columns
    if "text" in strings:
        return ("text",)
    if len(strings) == 1:
        return (strings[0],)
    raise DataError(
        f"data = {job.data!r}: "
        + (f"columns of text: {', '.join(strings)}; name" if strings else "no column of text; name")
        + " those that are compared with --set columns=[NAME]"
    )


def plan_dedupe(job: DedupeJob, machine: Machine) -> list[DedupePlan]:
    """The ways to do it, best first.

    Those that find about as many pairs at the threshold as the best come first, the fastest of them
    at the top.

    Raises:
        PlanError: nothing fits in the machine's memory, or no method compares such data.
        DataError: the data cannot be read.
    """
    chosen: Deduper | None = None
    if job.method is not None:
        chosen = table("deduper").build(job.method, where="method")
    work, rows = _work_of(job, machine, job.compared if chosen is None else chosen.compared)
    methods = list(_methods(work, machine) if chosen is None else [chosen])
    plans = [_plan(job, machine, work, rows, method) for method in methods]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min((plan.predicted["memory_bytes"].value for plan in plans), default=0.0)
        raise PlanError(
            f"{job.data} on {machine.name}: no method "
            + (f"fits; {human_bytes(least)} are needed" if plans else f"compares {job.compared}")
            + "; give fewer workers, or another method"
        )
    best = max(plan.predicted["finds"].value for plan in fitting)

    def rank(plan: DedupePlan) -> tuple[bool, float]:
        worse = plan.predicted["finds"].value < best - _WORSE
        return worse, plan.predicted["total_s"].value

    return sorted(fitting, key=rank)


def _work_of(job: DedupeJob, machine: Machine, compared: Compared) -> tuple[DedupeWork, int | None]:
    """What the estimates read, and the rows where they are known."""
    rows, reading = None, RowRates()
    if compared == "rows":
        source = source_of(job)
        text_columns(source, job)
        num_bytes, rows = source.num_bytes, source.count()
        reading, _ = row_rates(source, machine)
        tables = 1
    elif job.data == "stdlib":
        num_bytes, tables = open_source(job.data).num_bytes, 1
    else:
        listing = find_files(job.data, "*", option="data")
        num_bytes, tables = listing.num_bytes, len(listing.files)
    work = DedupeWork(
        compared=compared,
        num_bytes=num_bytes,
        rows=float(rows)
        if rows is not None
        else num_bytes * reading.inflate / (reading.row_bytes or _ROW_BYTES),
        tables=tables,
        threshold=job.threshold,
        unit=job.unit,
        ngram=job.ngram,
        workers=job.workers,
        rates=rates_of(machine),
        reading=reading,
    )
    return work, rows


def _methods(work: DedupeWork, machine: Machine) -> Iterator[Deduper]:
    dedupers = table("deduper")
    for name in dedupers:
        method: Deduper = dedupers.build(name)
        if method.compared == work.compared:
            yield from method.candidates(work, machine)


def _plan(
    job: DedupeJob, machine: Machine, work: DedupeWork, rows: int | None, method: Deduper
) -> DedupePlan:
    cost, finds = method.estimate(work, machine), method.finds(work)
    memory = cost.memory_total + _RUNTIME
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("deduper").spell(method)
    seconds = cost.step_s
    rate = Interval(
        value=work.num_bytes / max(seconds.value, 1e-9),
        low=work.num_bytes / max(seconds.high, 1e-9),
        high=work.num_bytes / max(seconds.low, 1e-9),
    )
    basis = "timed on this machine" if work.rates.measured else "derived from its description"
    counted = f"{rows:,}" if rows is not None else f"about {work.rows:,.0f}"
    what = f"{work.tables:,} tables" if method.compared == "tables" else f"{counted} rows"
    return DedupePlan(
        job=job.model_copy(update={"method": spelled, "compared": method.compared}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "bytes_per_s": rate,
            "memory_bytes": Interval.around(memory, 0.4),
            "finds": Interval.around(finds, 0.0),
        },
        planner="dedupers",
        fits=not capacity or memory <= capacity,
        why=f"{spelled}: {what}, {human_bytes(work.num_bytes)}",
        notes=(
            f"rates {basis}",
            *(
                (f"rows: {_ROW_BYTES:g} bytes each, assumed",)
                if rows is None and method.compared == "rows" and not work.reading.row_bytes
                else ()
            ),
        ),
        num_bytes=work.num_bytes,
        rows=rows,
        tables=work.tables,
    )
