"""From a concrete job to a plan: its cost, whether it fits, why it is as it is."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.core.traits import traits
from shoal.cost.calibration import corrected
from shoal.cost.configs import notes as notes_of
from shoal.cost.latent import latent_of
from shoal.cost.price.rates import RankRates, ranks_per_host
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.memory import tier_bytes
from shoal.cost.training.step import bounds_of, estimate
from shoal.cost.training.totals import steps_of
from shoal.ir import Estimate, Machine, ModelShape, TrainJob, TrainPlan, Work
from shoal.plan.length import with_steps
from shoal.plan.strategy.objective import check_objective, worth

# Share of a rank's memory that a plan may fill; the rest is for what is not counted.
FILL = {"gpu": 0.92, "cpu": 0.85}

# Objective -> how a plan is that has more of it, and less of it.
WORSE = {
    "time": ("slower", ("faster", "fast")),
    "cost": ("dearer", ("cheaper", "cheap")),
    "energy": ("hungrier", ("thriftier", "thrifty")),
}

# The simplest choices come first.
_AGAIN = ("none", "full", "stage", "selective")

EQUAL = 1.01
"""Plans whose worths are within this factor are equal: the estimate knows no better."""

Judged = tuple[TrainJob, Estimate]


def usable_bytes(job: TrainJob, machine: Machine) -> float:
    """Bytes that a rank of ``job`` may fill."""
    capacity = RankRates(machine, job.parallel, job.threads).capacity_bytes
    return FILL[machine.device.kind] * capacity


def tier_room(job: TrainJob, machine: Machine) -> dict[str, float]:
    """Tier -> bytes that a rank of ``job`` may fill; tiers of unknown size are left out.

    ``device`` is the rank's own memory. Host and disk are their node's, and its ranks share them.
    """
    result = {"device": usable_bytes(job, machine)}
    sharing, device = ranks_per_host(machine, job.parallel), machine.device
    for tier, name in (("host", "dram"), ("disk", "disk")):
        behind = device.beyond(name)
        if behind is not None:
            result[tier] = FILL["cpu"] * behind.capacity_bytes / sharing
    return result


def beyond_room(job: TrainJob, machine: Machine, causes: Mapping[str, float]) -> tuple[str, ...]:
    """Tiers of which a rank needs more than is usable."""
    room = tier_room(job, machine)
    needed = tier_bytes(job, machine, causes)
    return tuple(tier for tier, size in needed.items() if size > room.get(tier, math.inf))


def excess(job: TrainJob, machine: Machine, causes: Mapping[str, float]) -> float:
    """Needed over usable memory per rank, of the tier where it is largest."""
    room = tier_room(job, machine)
    needed = tier_bytes(job, machine, causes)
    return max(needed[tier] / room[tier] for tier in needed if tier in room)


def missed(excess: float) -> int:
    """Plans that miss by about as much are of one class; of those that fit it is no question."""
    return round(math.log(excess) / math.log(1.15))


def fits(job: TrainJob, machine: Machine, cost: Estimate) -> bool:
    """Whether the predicted memory per rank is within the usable memory of every tier."""
    return not beyond_room(job, machine, cost.memory_bytes)


def filled(job: TrainJob, machine: Machine, cost: Estimate) -> str:
    """Memory of a rank in each tier, in words."""
    room = tier_room(job, machine)
    needed = tier_bytes(job, machine, cost.memory_bytes)
    notes = [f"{human_bytes(needed.pop('device'))} of {human_bytes(room['device'])} per rank"]
    for tier, size in needed.items():
        notes.append(
            f"{human_bytes(size)} of {human_bytes(room[tier])} of the {tier}"
            if tier in room
            else f"{human_bytes(size)} of the {tier}, whose size is not stated for {machine.name}"
        )
    return ", ".join(notes)


def describe(item: Judged, machine: Machine, *, place: int, first: str, best: Judged) -> str:
    """Why this plan is ranked here, and its bottleneck."""
    job, cost = item
    share = bounds_of(cost.terms_s)[cost.bound] / cost.step_s.value
    bound = f"bottleneck: {cost.bound} ({share:.0%} of a step)"
    memory = filled(job, machine, cost)
    if not fits(job, machine, cost):
        return f"does not fit: {memory}; {bound}"
    if place == 1:
        return f"{first}; {bound}; {memory}"
    more, less = WORSE[job.objective]
    least = worth(best[0], machine, best[1].step_s.value)
    beyond = worth(job, machine, cost.step_s.value) / least - 1
    pace = (
        f"as {less[1]} as the first"
        if abs(beyond) < 0.005
        else f"{abs(beyond):.0%} {more if beyond > 0 else less[0]} than the first"
    )
    return f"{pace}; {bound}; {memory}"


def _complexity(job: TrainJob) -> tuple[int, ...]:
    """Among plans of equal time the plainer one is better."""
    return (
        int(job.offload is not None) + len(traits("activation", job.activation)),
        job.parallel.pp,
        job.parallel.tp,
        len(traits("shard", job.shard)),
        int(job.base == "divided"),
        _AGAIN.index(job.recompute),
        -microbatch_of(job),
    )


def rank(found: Sequence[Judged], machine: Machine) -> list[Judged]:
    """Those that fit before those that do not; then by the job's objective, then the plainer.

    Raises:
        PlanError: the objective needs a number that the machine does not have.
    """
    for job, _ in found[:1]:
        check_objective(job, machine)

    def worth_of(item: Judged) -> float:
        return worth(item[0], machine, item[1].step_s.value)

    fitting = {id(item): fits(item[0], machine, item[1]) for item in found}

    def key(item: Judged) -> tuple[object, ...]:
        job, cost = item
        if not fitting[id(item)]:
            missing = excess(job, machine, cost.memory_bytes)
            return (1, missed(missing), worth_of(item))
        return (0, worth_of(item), cost.memory_total)

    ordered = sorted(found, key=key)
    good = [item for item in ordered if fitting[id(item)]]
    worths = [worth_of(item) for item in good]
    out: list[Judged] = []
    while len(out) < len(good):
        # In order of worth: the equal ones stand together.
        equal = good[len(out) : bisect.bisect_right(worths, EQUAL * worths[len(out)])]
        out.extend(sorted(equal, key=lambda item: (_complexity(item[0]), worth_of(item))))
    return out + [item for item in ordered if not fitting[id(item)]]


def to_plan(
    item: Judged,
    shape: ModelShape,
    machine: Machine,
    *,
    planner: str,
    why: str,
    notes: Sequence[str] = (),
) -> TrainPlan:
    """The plan of a judged job, its length in steps and its every field checked.

    The machine's correction of times comes in here: it is one for all plans of a job.
    """
    job, cost = item
    cost = corrected(cost, machine, job.engine, "step_s", job.model)
    fitting = fits(job, machine, cost)
    given = steps_of(job)
    timed = with_steps(job, cost)
    concrete = TrainJob.model_validate(timed.model_dump(mode="json"))
    if given is None:
        cost = estimate(Work(shape=shape, job=concrete), machine)
        cost = corrected(cost, machine, job.engine, "step_s", job.model)
    activation = table("activation").build(concrete.activation)
    saved = activation.notes(Work(shape=shape, job=concrete), cost.step_s.value)
    return TrainPlan(
        job=concrete,
        machine=machine,
        shape=shape,
        estimate=cost,
        planner=planner,
        fits=fitting,
        why=why,
        notes=(*notes, *_notes(concrete, shape, machine), *saved),
        minutes=job.minutes,
    )


def _notes(job: TrainJob, shape: ModelShape, machine: Machine) -> tuple[str, ...]:
    notes: list[str] = []
    if job.offload is not None:
        notes += table("offload").build(job.offload).notes(Work(shape=shape, job=job), machine)
    if shape.attention not in ("MHA", "GQA", "MQA") and latent_of(shape) is None:
        notes.append(f"{shape.attention} attention is counted as grouped-query attention")
    notes += notes_of(shape)
    return tuple(notes)
