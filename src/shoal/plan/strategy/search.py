"""Search: price every legal plan and sort."""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, TrainPlan, Work
from shoal.plan.strategy.beyond import NONE, names_of, refusal, ways
from shoal.plan.strategy.judge import Judged, describe, fits, may_fit, rank, to_plan
from shoal.plan.strategy.remedy import remedies
from shoal.plan.strategy.space import candidates

__all__ = ["Search"]

BEST = {"time": "fastest", "cost": "cheapest", "energy": "thriftiest"}


@part
class Search:
    """Price all legal splits, shards, micro-batches and recomputations; the default.

    Args:
        keep: plans handed back, best first.
        offload: ways beyond the device's memory that are searched too: names of parts of kind
            ``offload`` or ``activation``, ``none`` for everything on the device, or auto for all;
            empty takes the job as it is.
    """

    keep: int = 10
    offload: tuple[str, ...] | str = ()

    def __post_init__(self) -> None:
        require(1 <= self.keep <= 10_000, "planner.search.keep", self.keep, expected="1 to 10000")
        names_of(self.offload or (NONE,))

    def plan(self, job: TrainJob, machine: Machine) -> list[TrainPlan]:
        """See :class:`~shoal.plan.strategy.protocols.Planner`."""
        shape = shape_of(job)
        found = self._found(job, shape, machine)
        if not found:
            raise PlanError(
                f"{job.model} on {machine.name}: no split of {machine.num_devices} device(s) is "
                f"legal for {shape.num_heads} heads, {shape.num_kv_heads} key/value heads, "
                f"{shape.num_layers} blocks and global_batch = {job.global_batch}; change "
                "global_batch or microbatch, or leave parallel open"
            )
        ordered = rank(found, machine)[: self.keep]
        notes: tuple[str, ...] = ()
        if not fits(ordered[0][0], machine, ordered[0][1]):
            notes = remedies(job, shape, machine, ordered[0])
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
                    first=f"{BEST[job.objective]} of {len(found)} plans priced",
                    best=ordered[0],
                ),
                notes=notes,
            )
            for place, item in enumerate(ordered, 1)
        ]

    def _found(self, job: TrainJob, shape: ModelShape, machine: Machine) -> list[Judged]:
        """Legal concrete jobs with their estimates: those that fit, or all where none does.

        Raises:
            PlanError: other ways are searched too, and none of them fits.
        """
        if not self.offload:
            return price_all(job, shape, machine)
        tried = ways(job, shape, machine, names_of(self.offload), Pricer(machine))
        found = [item for way in tried if way.fits for item in way.found]
        if not found:
            raise refusal(job, machine, tried)
        return found


def price_all(job: TrainJob, shape: ModelShape, machine: Machine) -> list[Judged]:
    """Legal concrete jobs with their estimates: those that fit, or all where none does."""
    pricer = Pricer(machine)
    works = [
        Work.model_construct(shape=shape, job=candidate)
        for candidate in candidates(job, machine, shape=shape)
    ]
    fitting = [work for work in works if may_fit(work, pricer)]
    return [(work.job, pricer.estimate(work)) for work in fitting or works]
