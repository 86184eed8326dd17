"""Plans of a sparse coding: every model that is for such data, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.fields.data.sparse_coding.costs import rates_of
from shoal.fields.data.sparse_coding.inputs import points_of
from shoal.fields.data.sparse_coding.job import SparseCodeJob, SparseCodePlan
from shoal.fields.data.sparse_coding.models.mca import negative_share
from shoal.fields.data.sparse_coding.protocols import CodingWork, Superposition
from shoal.fields.data.sparse_coding.states import StateSpace
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow.
_RUNTIME = 2.5e8


def plan_sparse_code(job: SparseCodeJob, machine: Machine) -> list[SparseCodePlan]:
    """The models for such data, the fastest first; which is right, only the data can tell.

    Raises:
        PlanError: nothing fits in the machine's memory.
        SparseCodeError: the data cannot be explained like that, or there cannot be so many
            candidates or active causes.
        DataError: the data cannot be read.
    """
    data, note = points_of(job)
    if job.method is not None:
        table("superposition").build(job.method, where="method").check(data)
    StateSpace(job.components, job.candidates, job.active)
    work = CodingWork(
        points=data.shape[0],
        dim=data.shape[1],
        components=job.components,
        candidates=job.candidates,
        active=job.active,
        iterations=job.iterations,
        workers=job.workers if job.pool is not None else 1,
        restarts=job.restarts,
        negative=negative_share(data),
        rates=rates_of(machine),
    )
    plans = [_plan(job, machine, work, model, note) for model in _models(job, work, machine)]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min((plan.predicted["memory_bytes"].value for plan in plans), default=0.0)
        raise PlanError(
            f"{work.points} vectors and {job.components} components on {machine.name}: no model "
            f"fits in {human_bytes(machine.device.main_memory.capacity_bytes)}; "
            f"{human_bytes(least)} are needed: use fewer vectors, candidates or active causes"
        )
    return sorted(fitting, key=lambda plan: plan.predicted["total_s"].value)


def _models(job: SparseCodeJob, work: CodingWork, machine: Machine) -> Iterator[Superposition]:
    models = table("superposition")
    if job.method is not None:
        yield models.build(job.method, where="method")
        return
    for name in models:
        yield from models.build(name).candidates(work, machine)


def _plan(
    job: SparseCodeJob, machine: Machine, work: CodingWork, model: Superposition, note: str
) -> SparseCodePlan:
    cost = model.estimate(work, machine)
    memory = cost.memory_total + _RUNTIME * (1 + (work.workers if work.workers > 1 else 0))
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("superposition").spell(model)
    states = StateSpace(job.components, job.candidates, job.active, model.values).num_states
    basis = "timed on this machine" if work.rates.measured else "derived from its description"
    passes = float(work.points * work.iterations)
    seconds = cost.step_s
    rate = Interval(
        value=passes / seconds.value, low=passes / seconds.high, high=passes / seconds.low
    )
    return SparseCodePlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "points_per_s": rate,
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="superpositions",
        fits=not capacity or memory <= capacity,
        why=f"{spelled}: {work.points} vectors of {work.dim}, {states} states of each",
        notes=(f"rates {basis}", *([note] if note else [])),
        points=work.points,
        dim=work.dim,
    )
