"""Ways beyond the device's memory, as a dimension of the space of plans.

A job that does not state ``offload`` can be planned with every part of that kind, in every place
that the part offers, and with what the forward pass saves on a disk. Budgets are what the machine
has: of a GPU's memory, and of the host's and the disk's where its description says how large they
are.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice, options_of, table
from shoal.core.traits import traits
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.memory import RUNTIME_BYTES
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, Parallel, TrainJob, Work
from shoal.plan.composition import check_composition
from shoal.plan.strategy.judge import (
    EQUAL,
    Judged,
    beyond_room,
    excess,
    filled,
    rank,
    tier_room,
)
from shoal.plan.strategy.objective import check_objective, worth
from shoal.plan.strategy.space import candidates, most_ranks

NONE = "none"
"""The way of a job as it is."""

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PartCandidate:
    """One part, and the best that a job can do with it.

    Args:
        name: of a part of kind ``offload`` or ``activation``, or :data:`NONE`.
        plans: the best that fit, or where none does the one that misses by least.
        best: the best of them; None if none is legal.
        fits: it does.
        refused: why none is legal.
    """

    name: str
    plans: tuple[Judged, ...] = ()
    best: Judged | None = None
    fits: bool = False
    refused: str = ""

    @property
    def spelled(self) -> str:
        """The settings of a job that choose it."""
        if self.best is None:
            return self.name
        job = self.best[0]
        notes = [] if job.offload is None else [f"offload: {job.offload}"]
        if "moves_activations" in traits("activation", job.activation):
            notes.append(f"activation: {job.activation}")
        return ", ".join([*notes, f"recompute: {job.recompute}"])


def every_way() -> tuple[str, ...]:
    """All names: none, and the parts that may be proposed by which something leaves the device."""
    return (NONE, *table("offload").proposable(), *_movers())


def names_of(asked: Sequence[str] | str) -> tuple[str, ...]:
    """The ways that an option asks for: ``auto`` for all, or names.

    Raises:
        ConfigError: there is no such way.
    """
    names = tuple(part.strip() for part in asked.split(",")) if isinstance(asked, str) else asked
    if tuple(names) == ("auto",):
        return every_way()
    for name in names:
        require(
            name in every_way(),
            "planner.search.offload",
            name,
            expected=f"auto, or some of {', '.join(every_way())}",
        )
    return tuple(dict.fromkeys(names))


def ways(
    job: TrainJob,
    shape: ModelShape,
    machine: Machine,
    names: Sequence[str],
    pricer: Pricer,
    keep: int = 1,
) -> list[PartCandidate]:
    """Each of these ways with its ``keep`` best plans, in the order of the names.

    Raises:
        PlanError: the job states one of its own; or no parallelism configuration
            is valid with any offloading option.
    """
    stated = _states(job)
    others = [name for name in names if name != NONE]
    if stated and others:
        said = f"offload: {job.offload}" if job.offload else f"activation: {job.activation}"
        raise PlanError(
            f"planner.search.offload = {', '.join(names)}: the job states {said}; leave one of "
            "the two out"
        )
    check_objective(job, machine)
    return [_way(job, shape, machine, name, pricer, keep) for name in names]


def _way(
    job: TrainJob, shape: ModelShape, machine: Machine, name: str, pricer: Pricer, keep: int
) -> PartCandidate:
    """The best plans of a way: in the order of their bounds, until none beats what is kept."""
    open_jobs = [
        (worth(candidate, machine, _least_s(candidate, shape, pricer)), candidate, variant)
        for variant in _variants(job, shape, machine, name)
        for candidate in candidates(variant, machine, shape=shape)
        if name == NONE or _tried(candidate, job, machine)
    ]
    order = sorted(range(len(open_jobs)), key=lambda index: open_jobs[index][0])
    refused, nearest = "", None
    least = (math.inf, math.inf)
    fitting: list[Judged] = []
    best: list[float] = []
    for index in order:
        bound, candidate, variant = open_jobs[index]
        if len(best) == keep and bound > EQUAL * best[-1]:
            break
        if name != NONE and (why := _refused(candidate, variant)):
            refused = refused or why
            continue
        concrete = _within(candidate, shape, machine)
        work = Work.model_construct(shape=shape, job=concrete)
        needed = excess(concrete, machine, pricer.memory(work))
        if needed <= 1.0:
            cost = pricer.estimate(work)
            fitting.append((concrete, cost))
            bisect.insort(best, worth(concrete, machine, cost.step_s.value))
            del best[keep:]
        elif (needed, index) < least:
            least, nearest = (needed, index), work
    if fitting:
        return PartCandidate(
            name=name, plans=tuple(fitting), best=rank(fitting, machine)[0], fits=True
        )
    if nearest is None:
        return PartCandidate(name=name, refused=refused or "no parallelism configuration is valid")
    # Where none fits, the one that misses by least says enough.
    closest = nearest.job, pricer.estimate(nearest)
    return PartCandidate(name=name, plans=(closest,), best=closest)


def _least_s(job: TrainJob, shape: ModelShape, pricer: Pricer) -> float:
    """Seconds that a step takes at least; what leaves the device only adds to them."""
    work = Work.model_construct(shape=shape, job=job)
    return pricer.least_s(work, microbatch_of(job), job.recompute)


def _tried(candidate: TrainJob, job: TrainJob, machine: Machine) -> bool:
    """Of a split that was not stated: all devices, those of a node or one, in a plain pipeline.

    What lies in slow tiers is what a step waits for then; a finer search would find no more. The
    ranks of a CPU have one memory, of which stages save nothing.
    """
    if "parallel" in job.model_fields_set:
        return True
    most = most_ranks(machine)
    split = candidate.parallel
    default = split.schedule == Parallel().schedule
    if split.world not in (most, most // machine.nodes, 1) or not default:
        return False
    return split.pp == 1 or machine.device.kind == "gpu"


def _movers() -> Iterator[str]:
    """Parts by which saved activations leave the device."""
    return (
        name
        for name in table("activation").proposable()
        if "moves_activations" in traits("activation", name)
    )


def _states(job: TrainJob) -> bool:
    """Whether the job says itself what leaves the device."""
    return job.offload is not None or "moves_activations" in traits("activation", job.activation)


def _variants(job: TrainJob, shape: ModelShape, machine: Machine, name: str) -> Iterator[TrainJob]:
    """The job with this part, as the part offers itself."""
    if name == NONE:
        yield job
        return
    kind = "activation" if name in table("activation") else "offload"
    for choice, _ in table(kind).offered(Work.model_construct(shape=shape, job=job), machine):
        if choice.name == name:
            yield job.model_copy(update={kind: choice})


def _refused(candidate: TrainJob, variant: TrainJob) -> str:
    """Why a part does not go with a job; empty if it does."""
    if candidate.layers:
        return "layers: blocks that run in different ways are not priced with offload"
    try:
        check_composition(candidate)
        if variant.offload is not None:
            table("offload").build(variant.offload).check(candidate)
    except (ConfigError, PlanError) as cause:
        return str(cause)
    return ""


def _within(job: TrainJob, shape: ModelShape, machine: Machine) -> TrainJob:
    """The job with budgets that its part takes from what a rank may fill."""
    if job.offload is None:
        return _stored(job, shape, machine)
    if machine.device.kind == "cpu":
        return job  # its device and its host are one memory
    known = options_of(table("offload").load(job.offload.name))
    room = tier_room(job, machine)
    room["device"] -= RUNTIME_BYTES["gpu"]
    budgets = {
        f"{tier}_budget": int(size) // _MIB * _MIB
        for tier, size in room.items()
        if f"{tier}_budget" in known and size >= _MIB
    }
    choice = Choice(name=job.offload.name, options={**job.offload.options, **budgets})
    return job.model_copy(update={"offload": choice})


def _stored(job: TrainJob, shape: ModelShape, machine: Machine) -> TrainJob:
    """The job with room on the disk for what it saves there."""
    part = table("activation").build(job.activation)
    if not hasattr(part, "capacity"):
        return job
    work = Work.model_construct(shape=shape, job=job)
    need = -(-int(part.stored(work)) // _MIB) * _MIB
    if need <= part.capacity:
        return job
    choice = Choice(name=job.activation.name, options={**job.activation.options, "capacity": need})
    return job.model_copy(update={"activation": choice})


def refusal(job: TrainJob, machine: Machine, found: Sequence[PartCandidate]) -> PlanError:
    """Nothing fits: what each way needs, or why it cannot be had."""
    notes = []
    for way in found:
        if way.best is None:
            notes.append(f"{way.name}: {way.refused}")
            continue
        candidate, cost = way.best
        short = " and ".join(beyond_room(candidate, machine, cost.memory_bytes))
        notes.append(f"{way.name}: too little {short}, {filled(candidate, machine, cost)}")
    names = ", ".join(way.name for way in found)
    return PlanError(
        f"{job.model} on {machine.name}: nothing fits with offload {names} "
        f"({'; '.join(notes)}); give more devices, a shorter seq_len or a smaller model"
    )


# What was asked last, and its answer.
_LAST: dict[str, Any] = {}


def all_ways(job: TrainJob, shape: ModelShape, machine: Machine) -> list[PartCandidate]:
    """Every way, those that fit before the others, fastest first; none if the job states one."""
    if _states(job):
        return []
    asked = job.model_dump_json(exclude_unset=True), shape, machine.model_dump_json()
    # A plan that does not fit names them, and `--fit` shows them beside it.
    if _LAST.get("asked") != asked:
        _LAST.update(asked=asked, ways=ways(job, shape, machine, every_way(), Pricer(machine)))
    result: list[PartCandidate] = _LAST["ways"]

    def order(way: PartCandidate) -> tuple[bool, bool, float]:
        seconds = way.best[1].step_s.value if way.best is not None else 0.0
        return not way.fits, way.best is None, seconds

    return sorted(result, key=order)
