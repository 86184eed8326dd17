"""Rules: the take-aways of Megatron-LM, without a search.

1. Tensor parallelism up to the devices of a node; pipeline parallelism across nodes.
2. Just so much of both that the model fits; data parallelism takes the rest.
3. A micro-batch large enough for efficient products and small enough for a short bubble.

Recomputation and divided optimizer state come before more model parallelism, since they
cost less.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, 2021, sections 3.2 to 3.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.core.traits import traits
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, Parallel, TrainJob, TrainPlan, Work
from shoal.plan.composition import check_composition
from shoal.plan.defaults import settled_training
from shoal.plan.strategy.judge import Judged, describe, fits, rank, to_plan
from shoal.plan.strategy.remedy import remedies
from shoal.plan.strategy.space import candidates, legal_parallel, most_ranks, no_candidates


@part
class RulesPlanner:
    """Choose a plan by rules of thumb, pricing few plans; a baseline for the search.

    Args:
        largest_microbatch: largest number of sequences of a micro-batch.
        bubble: largest share of a step that the pipeline's bubble may take.
    """

    largest_microbatch: Annotated[int, Ge(1)] = 8
    bubble: Annotated[float, Gt(0), Le(1)] = 0.15

    def plan(self, job: TrainJob, machine: Machine) -> list[TrainPlan]:
        job = settled_training(job, machine)
        shape = shape_of(job)
        check_composition(job)
        pricer = Pricer(machine)
        tried: list[Judged] = []
        chosen: Judged | None = None
        for parallel in self._degrees(job, shape, machine):
            priced = self._priced(job, shape, machine, parallel, pricer)
            tried.extend(priced)
            chosen = next((item for item in priced if fits(item[0], machine, item[1])), None)
            if chosen is not None:
                break
        if not tried:
            raise no_candidates(job, machine, shape)
        rest = rank([item for item in tried if item is not chosen], machine)
        notes: tuple[str, ...] = ()
        if chosen is None:
            chosen, *rest = rest
            notes = remedies(job, shape, machine, chosen)
        ordered = [chosen, *rest[:9]]
        return [
            to_plan(
                item,
                shape,
                machine,
                planner="rules",
                why=describe(item, machine, place=place, first="by the rules", best=ordered[0]),
                notes=notes,
            )
            for place, item in enumerate(ordered, 1)
        ]

    def _degrees(self, job: TrainJob, shape: ModelShape, machine: Machine) -> Iterator[Parallel]:
        """Splits in the order in which the rules try them: least model parallelism first."""
        if "parallel" in job.model_fields_set:
            yield job.parallel
            return
        for world in range(most_ranks(machine), 0, -1):
            legal = list(legal_parallel(job, shape, machine, world))
            if legal:
                yield from sorted(legal, key=lambda p: (p.tp * p.pp, p.pp))
                return

    def _priced(
        self,
        job: TrainJob,
        shape: ModelShape,
        machine: Machine,
        parallel: Parallel,
        pricer: Pricer,
    ) -> list[Judged]:
        """Concrete jobs of one split, in the order of preference."""
        fixed = job.model_copy(update={"parallel": parallel})
        options = [
            candidate
            for candidate in candidates(fixed, machine, shape=shape)
            if self._acceptable(candidate) or job.microbatch is not None
        ]
        options.sort(
            key=lambda x: (
                x.precision != job.precision,
                # Gathered weights and small products cost more than a second forward pass.
                "shards_weights" in traits("shard", x.shard),
                (x.microbatch or 1) < min(4, x.global_batch // x.parallel.dp),
                x.recompute != "none",
                len(traits("shard", x.shard)),
                -(x.microbatch or 1),
            )
        )
        return [
            (option, pricer.estimate(Work.model_construct(shape=shape, job=option)))
            for option in options
        ]

    def _acceptable(self, job: TrainJob) -> bool:
        size = job.microbatch or 1
        number = job.global_batch // job.parallel.dp // size
        short = (job.parallel.pp - 1) <= self.bubble * (number + job.parallel.pp - 1)
        return size == 1 or (size <= self.largest_microbatch and short)
