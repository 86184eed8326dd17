"""The best of many jobs, of which few are priced.

Of every job it is soon known whether it fits, and what its step takes at least. They are priced in
the order of these bounds, until no bound is left that beats the worst plan that is kept.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, Work
from shoal.plan.emit.expressed import refuses
from shoal.plan.experts.moe_auto import ChunkChooser
from shoal.plan.strategy.judge import EQUAL, Judged, beyond_room, excess, missed, usable_bytes
from shoal.plan.strategy.objective import check_objective, worth
from shoal.plan.strategy.space import PlanFamily, cannot_run, families


class BoundedResult(NamedTuple):
    """What a search found.

    Args:
        priced: plans with their estimates, those that are to be kept among them.
        number: plans that fit, or all where none does.
    """

    priced: list[Judged]
    number: int


class _Member(NamedTuple):
    """One job of a family, sorted by what it is worth at best.

    Args:
        missed: by how much it does not fit; 0 for all where some do.
        bound: the least that its step may be worth, in the unit of the objective.
        order: where it stands among all.
        family: of which it is.
        choice: micro-batch, recomputation and precision.
    """

    missed: int
    bound: float
    order: tuple[int, ...]
    family: PlanFamily
    choice: tuple[int, str, str]


def best_of(
    job: TrainJob,
    shape: ModelShape,
    machine: Machine,
    keep: int,
    pricer: Pricer,
    *,
    syncs: Sequence[str] = (),
) -> BoundedResult:
    """The ``keep`` best plans of the space, and those that are as good as one of them.

    Args:
        job: what it leaves open is chosen.
        shape: the model.
        machine: to run on.
        keep: how many are wanted.
        pricer: of the machine.
        syncs: parts of kind ``sync`` that are searched beside the job's own.

    Raises:
        PlanError: the given parallelism is invalid, the machine has no value that the objective
            needs, or the job's engine can run no plan.
    """
    space = list(families(job, machine, shape, syncs))
    if space:
        check_objective(job, machine)
    heap = list(_fitting(space, shape, pricer)) or list(_missing(space, shape, pricer))
    number = len(heap)
    heapq.heapify(heap)
    chooser = ChunkChooser(shape, machine)
    refused: tuple[str, ...] = ()
    results: list[tuple[tuple[int, ...], Judged]] = []
    best: list[tuple[int, float]] = []
    while heap:
        one = heapq.heappop(heap)
        if len(best) == keep and (one.missed, one.bound) > (best[-1][0], EQUAL * best[-1][1]):
            break
        candidate = chooser.planned(one.family.member(*one.choice))
        if refused := refuses(candidate, shape, machine):
            number -= 1
            continue
        cost = pricer.estimate(Work.model_construct(shape=shape, job=candidate))
        results.append((one.order, (candidate, cost)))
        bisect.insort(best, (one.missed, worth(candidate, machine, cost.step_s.value)))
        del best[keep:]
    if refused and not results:
        raise cannot_run(job, refused)
    results.sort(key=lambda item: item[0])
    return BoundedResult([item for _, item in results], number)


def _fitting(space: list[PlanFamily], shape: ModelShape, pricer: Pricer) -> Iterator[_Member]:
    """Jobs that fit. A larger micro-batch needs no less memory than a smaller one."""
    machine = pricer.machine
    for number, family in enumerate(space):
        room = usable_bytes(family.job, machine)
        plain = pricer.is_plain(family.job)
        for p, precision in enumerate(family.precisions):
            work = _work(family, precision, shape)
            for r, recompute in enumerate(family.recomputes):
                for s, size in enumerate(family.sizes):
                    if plain:
                        causes = pricer.plain_memory(work, size, recompute)
                        if sum(causes.values()) > room:
                            break
                    elif beyond_room(
                        family.job,
                        machine,
                        _memory(family, (size, recompute, precision), pricer, shape),
                    ):
                        continue
                    yield _Member(
                        0,
                        worth(family.job, machine, pricer.least_s(work, size, recompute)),
                        (number, s, r, p),
                        family,
                        (size, recompute, precision),
                    )


def _missing(space: list[PlanFamily], shape: ModelShape, pricer: Pricer) -> Iterator[_Member]:
    """All jobs, of which none fits."""
    machine = pricer.machine
    for number, family in enumerate(space):
        for p, precision in enumerate(family.precisions):
            work = _work(family, precision, shape)
            for r, recompute in enumerate(family.recomputes):
                for s, size in enumerate(family.sizes):
                    choice = (size, recompute, precision)
                    yield _Member(
                        missed(excess(family.job, machine, _memory(family, choice, pricer, shape))),
                        worth(family.job, machine, pricer.least_s(work, size, recompute)),
                        (number, s, r, p),
                        family,
                        choice,
                    )


def _work(family: PlanFamily, precision: str, shape: ModelShape) -> Work:
    job = family.job
    if precision != job.precision:
        job = job.model_copy(update={"precision": precision})
    return Work.model_construct(shape=shape, job=job)


def _memory(
    family: PlanFamily, choice: tuple[int, str, str], pricer: Pricer, shape: ModelShape
) -> dict[str, float]:
    return pricer.memory(Work.model_construct(shape=shape, job=family.member(*choice)))
