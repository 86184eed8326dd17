"""Plans of a preparation: what the guide proposes, and the usual defaults beside it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import PlanError
from shoal.core.parts import Choice
from shoal.core.scratch import scratch_directory
from shoal.core.sizes import human_bytes
from shoal.fields.data.prepare.batches import PrepTable
from shoal.fields.data.prepare.guide import guide, warnings, work_of
from shoal.fields.data.prepare.job import PrepareJob, PreparePlan, StepReason
from shoal.fields.data.prepare.passes import Passes
from shoal.fields.data.prepare.pipeline import build_steps, passes_of
from shoal.fields.data.prepare.profile import profile_of
from shoal.fields.data.prepare.protocols import PrepareWork, Reason, width_of
from shoal.fields.data.readers import BadRowCount
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow; copies of a batch that are in work.
_RUNTIME, _COPIES = 2.2e8, 10.0
# Rows of a batch, at least.
_LEAST = 1024
# Half-width of the intervals, where rates were timed here, and elsewhere.
_SPREAD_TIMED, _SPREAD_DERIVED = 1.0, 3.0
_DEFAULTS = ("drop_missing", "one_hot", "scale")


def table_of(job: PrepareJob) -> PrepTable:
    """The rows of a job.

    Raises:
        DataError: they cannot be read.
        PrepareError: there is no such target.
    """
    return PrepTable(job.data, job.target, job.holdout, job.batch_rows, job.seed, job.bad)


def plan_prepare(job: PrepareJob, machine: Machine) -> list[PreparePlan]:
    """What the guide proposes, then the defaults; or the steps that the job names.

    Raises:
        PlanError: not even small batches fit in the machine's memory.
        DataError: the data cannot be read.
        PrepareError: the steps do not go together, or there is no such target.
    """
    rows = table_of(job)
    with scratch_directory("prepare") as place:
        shards = rows.shards(BadRowCount())
        sketches, bad = Passes(shards, place, job.pool, job.workers).profile()
    profile = profile_of(sketches)
    work = work_of(profile, job.target, machine, job.seed)
    notes = warnings(profile, job.target)
    if bad.rows:
        notes.append(f"{bad.rows:,} rows cannot be read, the first: {bad.first}")
    given = Reason(measured="", rule="given by the job")
    if job.steps is not None:
        offers = {"job": [(one, given) for one in job.steps]}
    else:
        usual = Reason(measured="", rule="what is usual, whatever the data are")
        offers = {
            "guide": guide(work, machine),
            "defaults": [(Choice(name=name), usual) for name in _DEFAULTS],
        }
    plans = [
        _plan(job, machine, work, rows, planner, steps, notes) for planner, steps in offers.items()
    ]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        needed = min(plan.predicted["memory_bytes"].value for plan in plans)
        raise PlanError(
            f"{job.data} on {machine.name}: {human_bytes(needed)} are needed for batches of "
            f"{_LEAST:,} rows; give fewer workers, or leave out columns"
        )
    return fitting


def _plan(
    job: PrepareJob,
    machine: Machine,
    work: PrepareWork,
    rows: PrepTable,
    planner: str,
    offered: Sequence[tuple[Choice, Reason]],
    notes: Sequence[str],
) -> PreparePlan:
    steps = build_steps(choice for choice, _ in offered)
    prices = [step.estimate(work, machine) for step in steps]
    profile, rates, width = work.profile, work.rates, width_of(work)
    passes = passes_of(steps)
    values = float(profile.rows * width)
    # Half of the steps, in the mean, are applied again before the next pass can look.
    again = len(steps) * passes / 2 * profile.rows * len(profile.columns) * rates.scan_s
    seconds = (
        (passes + 1) * rows.num_bytes * rates.byte_s
        + sum(price.step_s.value for price in prices)
        + again
        + values * (rates.sort_s + rates.write_s + 6 * rates.scan_s)
    )
    seconds /= max(1, min(job.workers, machine.device.num_cores or job.workers))
    kept = sum(price.memory_total for price in prices)
    row_bytes = 8.0 * max(width, len(profile.columns)) * _COPIES
    capacity = machine.device.main_memory.capacity_bytes or 2**60
    batch = job.batch_rows
    while batch > _LEAST and job.workers * (_RUNTIME + kept + batch * row_bytes) > capacity:
        batch //= 2
    memory = _RUNTIME + kept + batch * row_bytes
    spread = _SPREAD_TIMED if rates.measured else _SPREAD_DERIVED
    basis = "timed on this machine" if rates.measured else "derived from its description"
    if batch < job.batch_rows:
        notes = [*notes, f"batches of {batch:,} rows, for {human_bytes(capacity)} of memory"]
    return PreparePlan(
        job=job.model_copy(
            update={"steps": tuple(choice for choice, _ in offered), "batch_rows": batch}
        ),
        machine=machine,
        predicted={
            "total_s": Interval.around(seconds, spread),
            "bytes_per_s": Interval.around(rows.num_bytes / max(seconds, 1e-9), spread),
            "memory_bytes": Interval.around(memory, 0.4),
            "rows": Interval.exact(float(profile.rows)),
        },
        planner=planner,
        fits=job.workers * memory <= capacity,
        why=(
            f"{planner}: {profile.rows:,} rows, {len(profile.columns)} columns, "
            f"{human_bytes(rows.num_bytes)}; {passes} passes to fit, one to write"
        ),
        notes=(f"rates {basis}", *notes),
        profile=profile,
        reasons=tuple(
            StepReason(
                step=str(choice),
                reason=reason,
                seconds=price.step_s.value,
                memory_bytes=price.memory_total,
            )
            for (choice, reason), price in zip(offered, prices, strict=True)
        ),
        passes=passes,
    )
