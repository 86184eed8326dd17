"""Megatron: the plan that the take-aways of Megatron-LM give.

1. Tensor parallelism up to the devices of a node, then pipeline parallelism across nodes,
   until the model fits; data parallelism takes the rest.
2. The micro-batch that makes the step fastest, large products against a short bubble.
3. Several stages a rank (the interleaved schedule) where one would leave a long bubble.

Every data-parallel rank holds the whole optimizer state, as it did there; where :mod:`rules
<shoal.plan.strategy.rules>` would divide it first, this planner goes to more model parallelism.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, 2021, take-aways 1 to 3 and section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.parts import Choice, part
from shoal.cost.arithmetic import parameters
from shoal.cost.shapes import shape_of
from shoal.cost.training.megatron import bubble, training_days
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, Parallel, TrainJob, TrainPlan, Work
from shoal.plan.composition import check_composition
from shoal.plan.defaults import settled_training
from shoal.plan.strategy.judge import Judged, describe, fits, rank, to_plan
from shoal.plan.strategy.remedy import remedies
from shoal.plan.strategy.space import (
    candidates,
    divisors,
    legal_parallel,
    most_ranks,
    no_candidates,
)


@part
class MegatronPlanner:
    """Choose a plan by the three take-aways of the Megatron-LM paper.

    Args:
        bubble: largest ratio of idle time to work of a pipeline; above it, the number of stages per
            rank rises until the ratio is below.
        largest_vpp: largest number of stages per rank.
        keep: number of plans returned, best first.
    """

    bubble: Annotated[float, Gt(0), Le(1)] = 0.1
    largest_vpp: Annotated[int, Ge(1)] = 8
    keep: Annotated[int, Ge(1), Le(10_000)] = 10

    def plan(self, job: TrainJob, machine: Machine) -> list[TrainPlan]:
        job = settled_training(job, machine)
        shape = shape_of(job)
        check_composition(job)
        pricer = Pricer(machine)
        tried: list[Judged] = []
        for parallel in self._degrees(job, shape, machine):
            priced = [
                (option, pricer.estimate(Work.model_construct(shape=shape, job=option)))
                for option in self._options(job, shape, machine, parallel)
            ]
            tried.extend(priced)
            if any(fits(option, machine, cost) for option, cost in priced):
                break
        if not tried:
            raise no_candidates(job, machine, shape)
        ordered = rank(tried, machine)[: self.keep]
        notes: tuple[str, ...] = ()
        if not fits(ordered[0][0], machine, ordered[0][1]):
            notes = remedies(job, shape, machine, ordered[0])
        return [
            to_plan(
                item,
                shape,
                machine,
                planner="megatron",
                why=describe(
                    item,
                    machine,
                    place=place,
                    first="least model parallelism that fits, tensor before pipeline",
                    best=ordered[0],
                ),
                notes=(*notes, *_by_formula(item, shape)),
            )
            for place, item in enumerate(ordered, 1)
        ]

    def _degrees(self, job: TrainJob, shape: ModelShape, machine: Machine) -> Iterator[Parallel]:
        """Splits of all devices in the paper's order: tensor, then pipeline parallelism grows."""
        if "parallel" in job.model_fields_set:
            yield job.parallel
            return
        for world in range(most_ranks(machine), 0, -1):
            legal = list(legal_parallel(job, shape, machine, world))
            if not legal:
                continue
            widest = max(p.tp for p in legal)
            yield from sorted(
                (p for p in legal if p.pp == 1 or p.tp == widest), key=lambda p: (p.pp, p.tp)
            )
            return

    def _options(
        self, job: TrainJob, shape: ModelShape, machine: Machine, parallel: Parallel
    ) -> Iterator[TrainJob]:
        """Concrete jobs of one split."""
        fixed = job.model_copy(update={"parallel": parallel})
        if "shard" not in job.model_fields_set:
            fixed = fixed.model_copy(update={"shard": Choice(name="replicated")})
        for option in candidates(fixed, machine, shape=shape):
            if option.precision != job.precision:
                continue
            yield option if "parallel" in job.model_fields_set else self._interleaved(option, shape)

    def _interleaved(self, job: TrainJob, shape: ModelShape) -> TrainJob:
        """The job with so many stages a rank as its bubble asks for and its numbers allow."""
        split = job.parallel
        number = job.global_batch // split.dp // (job.microbatch or 1)
        if split.pp == 1 or number % split.pp or shape.num_layers % split.pp:
            return job
        legal = [v for v in divisors(shape.num_layers // split.pp) if v <= self.largest_vpp]
        enough = [v for v in legal if bubble(split.pp, number, v) <= self.bubble]
        vpp = enough[0] if enough else legal[-1]
        if vpp == 1:
            return job
        interleaved = split.model_copy(update={"vpp": vpp, "schedule": Choice(name="interleaved")})
        return job.model_copy(update={"parallel": interleaved})


def _by_formula(item: Judged, shape: ModelShape) -> tuple[str, ...]:
    """The paper's own days beside the estimate, where the plan is of its kind."""
    job, cost = item
    if job.tokens is None or job.recompute != "full":
        return ()
    devices = job.parallel.world
    # The paper counts every block's second forward pass as work.
    rate = cost.flops * 4 / 3 / cost.step_s.value / devices
    days = training_days(parameters(shape), job.tokens, devices, rate)
    return (
        f"8 T P / (n X) gives {days:.3g} days at {rate / 1e12:.3g} TFLOP/s a device, "
        "recomputation counted",
    )
