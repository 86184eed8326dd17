"""Plans of a curation: every method in every way that it offers, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.fields.data.curate.job import CurateJob, CuratePlan
from shoal.fields.data.curate.protocols import CurateWork, Curator
from shoal.fields.data.readers import arrow
from shoal.fields.data.row_rates import row_rates
from shoal.fields.data.sources import Source, open_source
from shoal.fields.data.vectors import dim_of
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow.
_RUNTIME = 2.5e8


def source_of(job: CurateJob) -> Source:
    """The rows of a job.

    Raises:
        DataError: they cannot be read.
    """
    return open_source(job.data, bad=job.bad)


def text_column(source: Source, job: CurateJob) -> str:
    """The column of text: the first that the user named, or ``text``; empty if it has none."""
    name, schema, types = (*job.columns, "text")[0], source.schema, arrow("types")
    if name not in schema.names:
        return ""
    kind = schema.field(name).type
    return name if types.is_string(kind) or types.is_large_string(kind) else ""


def plan_curate(job: CurateJob, machine: Machine) -> list[CuratePlan]:
    """The ways to do it, the fastest first.

    Raises:
        PlanError: nothing fits in the machine's memory, or no method is for such data.
        DataError: the data cannot be read.
    """
    source = source_of(job)
    rates, sample = row_rates(source, machine)
    work = CurateWork(
        num_bytes=source.num_bytes,
        rows=source.count(),
        columns=tuple(source.schema.names),
        text=text_column(source, job),
        dim=dim_of(source, job.columns),
        keep=job.keep,
        workers=job.workers,
        rates=rates,
        sample=sample,
    )
    plans = [_plan(job, machine, work, method) for method in _methods(job, work, machine)]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min((plan.predicted["memory_bytes"].value for plan in plans), default=0.0)
        raise PlanError(
            f"{job.data} on {machine.name}: no method "
            + (f"fits; {human_bytes(least)} are needed" if plans else "is for such columns")
            + "; give fewer workers, or another method"
        )
    return sorted(fitting, key=lambda plan: plan.predicted["total_s"].value)


def _methods(job: CurateJob, work: CurateWork, machine: Machine) -> Iterator[Curator]:
    curators = table("curator")
    if job.method is not None:
        yield curators.build(job.method, where="method")
        return
    for name in curators:
        yield from curators.build(name).candidates(work, machine)


def _plan(job: CurateJob, machine: Machine, work: CurateWork, method: Curator) -> CuratePlan:
    cost = method.estimate(work, machine)
    memory = cost.memory_total + _RUNTIME
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("curator").spell(method)
    seconds = cost.step_s
    rate = Interval(
        value=work.num_bytes / max(seconds.value, 1e-9),
        low=work.num_bytes / max(seconds.high, 1e-9),
        high=work.num_bytes / max(seconds.low, 1e-9),
    )
    return CuratePlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "bytes_per_s": rate,
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="curators",
        fits=not capacity or memory <= capacity,
        why=f"{spelled}: {human_bytes(work.num_bytes)} of {', '.join(work.columns[:6])}",
        notes=(
            "rates timed on some of the rows, on this machine"
            if work.rates.measured
            else "rates of reading and writing are of one core of a server",
        ),
        num_bytes=work.num_bytes,
        rows=work.rows,
    )
