"""Search: the best of all legal plans."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.errors import PlanError, require
from shoal.core.parts import part, table
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, TrainPlan
from shoal.plan.composition import check_composition
from shoal.plan.defaults import settled_training
from shoal.plan.strategy.beyond import NONE, names_of, refusal, ways
from shoal.plan.strategy.bounded import BoundedResult, best_of
from shoal.plan.strategy.judge import EQUAL, describe, fits, rank, to_plan
from shoal.plan.strategy.objective import worth
from shoal.plan.strategy.remedy import remedies

BEST = {"time": "fastest", "cost": "cheapest", "energy": "thriftiest"}


@part
class SearchPlanner:
    """Price all valid parallelism configurations, micro-batches and recomputations; the default.

    Args:
        keep: number of plans returned, best first.
        offload: offloading methods to search: names of parts of kind ``offload`` or ``activation``,
            ``none`` for no offloading, or ``auto`` for all of them; empty keeps the job's own
            choice.
        sync: parts of kind ``sync`` to search: their names, or ``auto`` for all that may be
            proposed. Synchronizing less than every step changes the result of training, so by
            default none is searched.
    """

    keep: Annotated[int, Ge(1), Le(10_000)] = 10
    offload: tuple[str, ...] | str = ()
    sync: tuple[str, ...] | str = ()

    def __post_init__(self) -> None:
        names_of(self.offload or (NONE,))
        self._syncs()

    def plan(self, job: TrainJob, machine: Machine) -> list[TrainPlan]:
        job = settled_training(job, machine)
        shape = shape_of(job)
        check_composition(job)
        result = self._ranked(job, shape, machine)
        if not result.priced:
            raise PlanError(
                f"{job.model} on {machine.name}: no split of {machine.num_devices} device(s) is "
                f"legal for {shape.num_heads} heads, {shape.num_kv_heads} key/value heads, "
                f"{shape.num_layers} blocks and global_batch = {job.global_batch}; change "
                "global_batch or microbatch, or leave parallel open"
            )
        ordered = rank(result.priced, machine)[: self.keep]
        notes: tuple[str, ...] = ()
        if not fits(ordered[0][0], machine, ordered[0][1]):
            notes = remedies(job, shape, machine, ordered[0])
        worths = [
            worth(one, machine, cost.step_s.value)
            for one, cost in ordered
            if not notes and fits(one, machine, cost)
        ]
        first = BEST[job.objective]
        if worths and worths[0] > min(worths):
            first = f"simplest within {EQUAL - 1:.0%} of the {first}"
        return [
            to_plan(
                item,
                shape,
                machine,
                planner="search",
                why=describe(
                    item,
                    machine,
                    place=place,
                    first=f"{first} of {result.number} plans priced",
                    best=ordered[0],
                ),
                notes=notes,
            )
            for place, item in enumerate(ordered, 1)
        ]

    def _syncs(self) -> tuple[str, ...]:
        """The parts of kind ``sync`` that are asked for.

        Raises:
            ConfigError: one of them may not be proposed.
        """
        names = self.sync
        if isinstance(names, str):
            names = tuple(name.strip() for name in names.split(","))
        known = table("sync").proposable()
        if names == ("auto",):
            return known
        for name in names:
            require(
                name in known,
                "planner.search.sync",
                name,
                expected=f"auto, or some of {', '.join(known)}",
            )
        return names

    def _ranked(self, job: TrainJob, shape: ModelShape, machine: Machine) -> BoundedResult:
        """The best legal jobs with their estimates.

        Raises:
            PlanError: other ways are searched too, and none of them fits.
        """
        pricer = Pricer(machine)
        if not self.offload:
            syncs = self._syncs()
            require(
                not syncs or "sync" not in job.model_fields_set,
                "planner.search.sync",
                ", ".join(syncs),
                expected=f"nothing, as the job states sync: {job.sync}; leave one of the two out",
                error=PlanError,
            )
            return best_of(job, shape, machine, self.keep, pricer, syncs=syncs)
        tried = ways(job, shape, machine, names_of(self.offload), pricer, self.keep)
        results = [item for way in tried if way.fits for item in way.plans]
        if not results:
            raise refusal(job, machine, tried)
        return BoundedResult(results, len(results))
