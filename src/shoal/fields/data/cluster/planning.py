"""Plans of a clustering: every method in every way that it offers, ranked."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.fields.data.cluster.costs import rates_of
from shoal.fields.data.cluster.inputs import shape_of
from shoal.fields.data.cluster.job import ClusterJob, ClusterPlan
from shoal.fields.data.cluster.protocols import Clusterer, ClusterError, ClusterWork
from shoal.fields.data.cluster.solve import check_k
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow.
_RUNTIME = 2.5e8


def work_of(job: ClusterJob, machine: Machine, n: int, dim: int) -> ClusterWork:
    """What the estimates of the methods read."""
    return ClusterWork(
        n=n,
        k=0 if job.k == "auto" else job.k,
        dim=dim,
        metric=job.metric,
        threads=job.threads,
        init=job.init,
        max_iter=job.max_iter,
        rates=rates_of(machine, dim=dim, metric=job.metric),
    )


def plan_cluster(job: ClusterJob, machine: Machine) -> list[ClusterPlan]:
    """The ways to do it, best first.

    Those whose loss is expected to be within ``max_excess`` of FasterPAM's come first, the fastest
    of them before the others; then the rest, the smallest loss first.

    Raises:
        PlanError: nothing fits in the machine's memory.
        ClusterError: there cannot be so many clusters.
        DataError: the data cannot be read.
    """
    n, dim, note = shape_of(job)
    if job.k != "auto":
        check_k(job.k, n)
    work = work_of(job, machine, n, dim)
    plans = [_plan(job, machine, work, method, note) for method in _methods(job, work, machine)]
    if not plans and job.k == "auto":
        raise ClusterError(
            f"k = auto: no method finds it with metric = {job.metric}; give k, or choose euclidean"
        )
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min((p.predicted["memory_bytes"].value for p in plans), default=0.0)
        raise PlanError(
            f"{n} objects and k = {job.k} on {machine.name}: no method fits in "
            f"{human_bytes(machine.device.main_memory.capacity_bytes)}"
            + (f"; {human_bytes(least)} are needed" if plans else "")
            + "; use vectors in the place of dissimilarities, a smaller k, or leave out method"
        )

    def rank(plan: ClusterPlan) -> tuple[bool, float, float]:
        assumed, seconds = plan.predicted.get("excess"), plan.predicted["total_s"].value
        excess = assumed.value if assumed is not None else 0.0
        worse = excess > job.max_excess
        return worse, excess if worse else 0.0, seconds

    return sorted(fitting, key=rank)


def _methods(job: ClusterJob, work: ClusterWork, machine: Machine) -> Iterator[Clusterer]:
    clusterers = table("clusterer")
    finders = [name for name in clusterers if clusterers.build(name).finds_k]
    if job.method is not None:
        if job.k == "auto" and job.method.name not in finders:
            raise ClusterError(
                f"k = auto: {job.method.name} needs the number of clusters; give k, or one of the "
                f"methods that find it: {', '.join(finders)}"
            )
        yield clusterers.build(job.method, where="method")
        return
    for name in finders if job.k == "auto" else clusterers:
        yield from clusterers.build(name).candidates(work, machine)


def _plan(
    job: ClusterJob, machine: Machine, work: ClusterWork, method: Clusterer, note: str
) -> ClusterPlan:
    cost, excess = method.estimate(work, machine), method.excess(work)
    memory = cost.memory_total + _RUNTIME
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("clusterer").spell(method)
    basis = "timed on this machine" if work.rates.measured else "derived from its description"
    needs = ", ".join(f"{human_bytes(size)} {what}" for what, size in cost.memory_bytes.items())
    notes = [
        f"rates {basis}; {method.assumes}",
        *([note] if note else []),
    ]
    return ClusterPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "total_s": cost.step_s,
            "memory_bytes": Interval.around(memory, 0.3),
            **({} if excess is None else {"excess": excess}),
        },
        planner="clusterers",
        fits=not capacity or memory <= capacity,
        why=f"{spelled}: {work.n} objects, {work.dim or 'no'} numbers each; memory: {needs}",
        notes=tuple(notes),
        n=work.n,
        dim=work.dim,
    )
