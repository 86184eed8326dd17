"""From a concrete job to a plan: its cost, whether it fits, why it is as it is."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from shoal.core.parts import table
from shoal.cost.rates import Rates
from shoal.cost.training import Pricer, estimate, microbatch_of
from shoal.cost.training_totals import steps_of
from shoal.ir import Estimate, Machine, ModelShape, Plan, TrainJob, Work
from shoal.plan.length import with_steps
from shoal.plan.strategy.objective import check_objective, worth

__all__ = ["Judged", "describe", "fits", "may_fit", "rank", "to_plan", "usable_bytes"]

# Share of a rank's memory that a plan may fill; the rest is for what nobody counted.
FILL = {"gpu": 0.92, "cpu": 0.85}

# Objective -> how a plan is that has more of it, and less of it.
WORSE = {
    "time": ("slower", ("faster", "fast")),
    "cost": ("dearer", ("cheaper", "cheap")),
    "energy": ("hungrier", ("thriftier", "thrifty")),
}

Judged = tuple[TrainJob, Estimate]


def usable_bytes(job: TrainJob, machine: Machine) -> float:
    """Bytes that a rank of ``job`` may fill."""
    capacity = Rates(machine, job.parallel, job.threads).capacity_bytes
    return FILL[machine.device.kind] * capacity


def fits(job: TrainJob, machine: Machine, cost: Estimate) -> bool:
    """The predicted memory of a rank is within what it may fill."""
    return _filled(job, machine, cost.memory_bytes) <= usable_bytes(job, machine)


def _filled(job: TrainJob, machine: Machine, causes: Mapping[str, float]) -> float:
    """Bytes of the device's memory; of a GPU's, what is offloaded takes none."""
    away = {"disk", "host"} if job.offload and machine.device.kind == "gpu" else {"disk"}
    return sum(size for cause, size in causes.items() if cause not in away)


def may_fit(work: Work, pricer: Pricer) -> bool:
    """The same, without pricing the plan."""
    filled = _filled(work.job, pricer.machine, pricer.memory(work))
    return filled <= usable_bytes(work.job, pricer.machine)


def describe(item: Judged, machine: Machine, *, place: int, first: str, best: Judged) -> str:
    """Why this plan, in a sentence, and what binds it."""
    job, cost = item
    terms = cost.terms_s
    step = cost.step_s.value
    groups = {
        "compute": terms["matmul"] + terms["attention"],
        "memory": terms["memory"] + terms["optimizer"],
        "network": terms["collective"],
        "bubble": terms["bubble"],
        "overhead": terms["overhead"],
    }
    bound = f"{cost.bound} binds it ({100 * groups[cost.bound] / step:.0f} % of a step)"
    room = usable_bytes(job, machine)
    memory = f"a rank fills {cost.memory_total / 1e9:.1f} of {room / 1e9:.1f} GB"
    if not fits(job, machine, cost):
        return f"does not fit: {memory}; {bound}"
    if place == 1:
        return f"{first}; {bound}; {memory}"
    more, less = WORSE[job.objective]
    beyond = worth(job, machine, cost) / worth(best[0], machine, best[1]) - 1
    pace = (
        f"as {less[1]} as the first"
        if abs(beyond) < 0.005
        else f"{100 * abs(beyond):.0f} % {more if beyond > 0 else less[0]} than the first"
    )
    return f"{pace}; {bound}; {memory}"


def _complexity(job: TrainJob) -> tuple[int, int, int, int, int]:
    """Among plans of equal time the plainer one is better."""
    shards = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 3}
    return (
        job.parallel.pp,
        job.parallel.tp,
        shards.get(job.shard.name, 4),
        int(job.recompute == "full"),
        -microbatch_of(job),
    )


def rank(found: Sequence[Judged], machine: Machine) -> list[Judged]:
    """Those that fit before those that do not; then by the job's objective, then the plainer.

    What is within one percent is equal: the estimate knows no better.

    Raises:
        PlanError: the objective needs a number that the machine does not have.
    """
    for job, _ in found[:1]:
        check_objective(job, machine)

    def worth_of(item: Judged) -> float:
        return worth(item[0], machine, item[1])

    def key(item: Judged) -> tuple[object, ...]:
        job, cost = item
        if not fits(job, machine, cost):
            # Plans that miss by about as much are sorted by time.
            missing = cost.memory_total / usable_bytes(job, machine)
            return (1, round(math.log(missing) / math.log(1.15)), worth_of(item))
        return (0, worth_of(item), cost.memory_total)

    ordered = sorted(found, key=key)
    good = [item for item in ordered if fits(item[0], machine, item[1])]
    worths = [worth_of(item) for item in good]
    out: list[Judged] = []
    while len(out) < len(good):
        # In order of worth: the equal ones stand together.
        equal = good[len(out) : bisect.bisect_right(worths, 1.01 * worths[len(out)])]
        out.extend(sorted(equal, key=lambda item: (_complexity(item[0]), worth_of(item))))
    return out + [item for item in ordered if not fits(item[0], machine, item[1])]


def to_plan(
    item: Judged,
    shape: ModelShape,
    machine: Machine,
    *,
    planner: str,
    why: str,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of a judged job, its length in steps and its every field checked."""
    job, cost = item
    fitting = fits(job, machine, cost)
    given = steps_of(job)
    timed = with_steps(job, cost)
    concrete = TrainJob.model_validate(timed.model_dump(mode="json"))
    if given is None:
        cost = estimate(Work(shape=shape, job=concrete), machine)
    activation = table("activation").build(concrete.activation)
    saved = activation.notes(Work(shape=shape, job=concrete), cost.step_s.value)
    return Plan(
        job=concrete,
        machine=machine,
        shape=shape,
        estimate=cost,
        planner=planner,
        fits=fitting,
        why=why,
        notes=(*notes, *_notes(concrete, shape, machine), *saved),
    )


def _notes(job: TrainJob, shape: ModelShape, machine: Machine) -> tuple[str, ...]:
    found: list[str] = []
    if job.offload is not None:
        found += table("offload").build(job.offload).notes(Work(shape=shape, job=job), machine)
    if shape.attention not in ("MHA", "GQA", "MQA"):
        found.append(f"{shape.attention} attention is counted as grouped-query attention")
    return tuple(found)
