"""Two grids over the same ranks: which split of attention with which split of the experts.

Every legal pair is priced by the cost model; tokens that go to experts on other nodes are what
folding avoids. Allocates nothing and needs no torch.

Source: Liu et al., MoE Parallel Folding, 2025.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.core.parts import Choice
from shoal.cost.price.experts import dispatch
from shoal.cost.price.shares import microbatch_of
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Estimate, Machine, Parallel, TrainJob, Work
from shoal.plan.strategy.judge import usable_bytes
from shoal.plan.strategy.space import candidates


class Fold(NamedTuple):
    """A pair of grids, and what a step with it costs.

    Args:
        parallel: both grids.
        near_bytes: bytes per rank and step to and from experts of its own node.
        far_bytes: to experts of other nodes.
        fits: the device has room for it.
    """

    parallel: Parallel
    estimate: Estimate
    near_bytes: float
    far_bytes: float
    fits: bool


def folds(job: TrainJob, machine: Machine, *, pp: int = 1, inside: bool = False) -> list[Fold]:
    """All pairs of grids of a machine's ranks, fastest first, those that fit before others.

    Args:
        job: the model, its sequences and batch; of its split nothing is read.
        machine: whose devices are the ranks.
        pp: pipeline stages.
        inside: also the grids whose experts are inside dp.

    Raises:
        PlanError: the model has no experts, or no pair is legal.
    """
    shape = shape_of(job)
    require(
        shape.num_experts > 0,
        "model",
        job.model,
        expected="a mixture of experts, such as Mixtral-8x7B-v0.1",
        error=PlanError,
    )
    pricer, folds = Pricer(machine), []
    seen: set[tuple[int, ...]] = set()
    open_job = job.model_copy(update={"shard": Choice(name="zero1"), "microbatch": 1})
    for one in candidates(open_job, machine, shape=shape):
        split = one.parallel
        key = (split.dp, split.tp, split.cp, split.ep, split.etp)
        plain = split.schedule == Parallel().schedule and split.vpp == 1 and one.recompute == "full"
        whole = split.world == machine.num_devices and split.pp == pp
        if key in seen or not (split.folded and plain and whole):
            continue
        seen.add(key)
        for fold in (True, False) if inside and split.etp == 1 else (True,):
            if not fold and split.dp % split.ep:
                continue
            grids = split.model_copy(update={"fold": fold})
            own = one.model_copy(update={"parallel": grids})
            estimate = pricer.estimate(Work(job=own, shape=shape))
            wire: dict[str, float] = {}
            dispatch(own, shape, machine, microbatch_of(own), wire)
            far = wire.pop("node", 0.0)
            fits = sum(estimate.memory_bytes.values()) <= usable_bytes(own, machine)
            folds.append(Fold(grids, estimate, sum(wire.values()), far, fits))
    require(
        bool(folds),
        "pp",
        pp,
        expected=f"stages with which {machine.num_devices} ranks and {shape.num_experts} experts "
        "have a grid each; give another number of stages, or a batch that more ranks divide",
        error=PlanError,
    )
    return sorted(folds, key=lambda fold: (not fold.fits, fold.estimate.step_s.value))
