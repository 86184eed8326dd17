"""What a step costs whose layers run in different ways: stages of layers, each with a strategy.

The makespan is that of the schedule, simulated with each stage's own passes and the machine's
links; the closed form of 1F1B, ``sum of stages + (m - 1) slowest stage``, serves the search.

Source: Miao et al., Galvatron, 2023; Wang et al., 2024 (stages in flight, section 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.pipeline.simulator import MachineLinks, simulate
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.layer_fit import LayerProfile
from shoal.cost.training.layers import LayerCost, ModelLayer, Strategy, layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.cost.training.memory import ALLOCATOR_SLACK, RUNTIME_BYTES
from shoal.cost.training.step import Pricer, bounds_of
from shoal.ir import Estimate, Interval, Machine, ModelShape, OpCosts, TrainJob, Work


class LayerPlan(NamedTuple):
    """Who runs which layer how.

    Args:
        stages: layers of each stage.
        strategies: of each layer.
        sequences: of a micro-batch, on all ranks of a stage.
        microbatches: of a step.
        ends: layout of embedding and output layer, and of the boundaries of stages; that of the
            adjacent blocks if not given.
    """

    stages: tuple[range, ...]
    strategies: tuple[Strategy, ...]
    sequences: int
    microbatches: int
    ends: Strategy | None = None

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.stages)

    @property
    def uniform(self) -> bool:
        """Every layer has the same strategy, and so have the ends."""
        first = self.strategies[0]
        ends = self.ends or first
        alike = ends.layout == first.layout and ends.shard == first.shard
        return alike and len(set(self.strategies)) == 1


@dataclass(frozen=True)
class StageCost:
    """What a stage costs one of its ranks.

    Args:
        layers: cost of each of its layers.
        change_s: seconds of changes between its layers, both passes.
        boundary_s: seconds to hand a micro-batch on, one direction.
        in_flight: micro-batches whose activations it holds at once.
    """

    layers: tuple[LayerCost, ...]
    change_s: float
    boundary_s: float
    in_flight: int

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass."""
        return sum(cost.forward_s for cost in self.layers) + self.change_s / 2

    @property
    def backward_s(self) -> float:
        """Seconds of a backward pass."""
        return sum(cost.backward_s for cost in self.layers) + self.change_s / 2

    @property
    def compute_s(self) -> float:
        """Seconds of a micro-batch in which the rank computes."""
        return sum(c.forward.device + c.backward.device + c.overhead_s for c in self.layers)

    @property
    def micro_s(self) -> float:
        """Seconds of a micro-batch, both passes and what is sent included."""
        return self.forward_s + self.backward_s + 2 * self.boundary_s

    @property
    def once_s(self) -> float:
        """Seconds spent once a step."""
        return sum(cost.once_s for cost in self.layers)

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes of one rank, by cause."""
        memory_bytes = {
            cause: sum(cost.states_bytes[cause] for cost in self.layers)
            for cause in ("weights", "gradients", "optimizer")
        }
        memory_bytes["activations"] = self.in_flight * sum(cost.held_bytes for cost in self.layers)
        memory_bytes["logits"] = max(cost.transient_bytes for cost in self.layers)
        return memory_bytes

    def total_bytes(self, device: str) -> float:
        """Bytes of one rank's process."""
        return RUNTIME_BYTES[device] + (1 + ALLOCATOR_SLACK) * sum(self.memory_bytes.values())


def in_flight(schedule: str, stage: int, pp: int, microbatches: int) -> int:
    """Micro-batches whose activations a stage holds at once."""
    return microbatches if schedule == "gpipe" else min(pp - stage, microbatches)


def stage_cost(
    pricer: LayerPricer,
    layers: Sequence[ModelLayer],
    strategies: Sequence[Strategy],
    *,
    end: str,
    pp: int,
    sequences: int,
    held: int,
    ends: Strategy | None = None,
) -> StageCost:
    """The cost of one stage.

    Args:
        pricer: of its layers.
        layers: of the stage.
        strategies: of these layers.
        end: ``embed`` for the first stage, ``head`` for the last, ``both``, or nothing.
        pp: stages.
        sequences: of a micro-batch, on all ranks of the stage.
        held: micro-batches in flight.
        ends: see :class:`LayerPlan`.
    """
    costs = []
    hidden = layers[0].shape.hidden
    layouts = [strategy.layout for strategy in strategies]
    if ends is not None:
        layouts = [ends.layout, *layouts, ends.layout]
        costs = [
            pricer.end(name, ends, sequences, pp)
            for name in ("embed", "head")
            if end in (name, "both")
        ]
        end = ""
    for at, (layer, strategy) in enumerate(zip(layers, strategies, strict=True)):
        here = "embed" if at == 0 and end in ("embed", "both") else ""
        if at == len(layers) - 1 and end in ("head", "both"):
            here = "both" if here else "head"
        costs.append(pricer.layer(layer, strategy, sequences, pp, here))
    change = sum(pricer.change(a, b, hidden, sequences, pp) for a, b in itertools.pairwise(layouts))
    boundary = pricer.boundary_s(sequences, layouts[-1], pp)
    return StageCost(tuple(costs), change, boundary, held)


def end_of(stage: int, pp: int) -> str:
    """Which ends of the model a stage has."""
    return "both" if pp == 1 else {0: "embed", pp - 1: "head"}.get(stage, "")


def stage_costs(
    pricer: LayerPricer, layers: Sequence[ModelLayer], plan: LayerPlan
) -> tuple[StageCost, ...]:
    """The cost of every stage."""
    schedule = pricer.job.parallel.schedule.name
    return tuple(
        stage_cost(
            pricer,
            [layers[at] for at in cut],
            [plan.strategies[at] for at in cut],
            end=end_of(stage, plan.pp),
            pp=plan.pp,
            sequences=plan.sequences,
            held=in_flight(schedule, stage, plan.pp, plan.microbatches),
            ends=plan.ends,
        )
        for stage, cut in enumerate(plan.stages)
    )


class TimedStage(Protocol):
    """What the closed form reads of a stage."""

    @property
    def micro_s(self) -> float:
        """Seconds of a micro-batch."""
        ...

    @property
    def once_s(self) -> float:
        """Seconds spent once a step."""
        ...


def seconds_of(stages: Sequence[TimedStage], microbatches: int) -> float:
    """Seconds of a step by the closed form of 1F1B."""
    micro = [stage.micro_s for stage in stages]
    once = max(stage.once_s for stage in stages)
    return sum(micro) + (microbatches - 1) * max(micro) + once


def simulated_s(
    stages: Sequence[StageCost], plan: LayerPlan, job: TrainJob, machine: Machine, hidden: int
) -> float:
    """Seconds of a step in the simulator, with the passes of each stage and the links between.

    Args:
        stages: costs of the stages.
        plan: whose stages these are.
        job: its schedule and precision count.
        machine: whose links join the stages.
        hidden: D.
    """
    once = max(stage.once_s for stage in stages)
    if plan.pp == 1:
        return plan.microbatches * stages[0].micro_s + once
    name = job.parallel.schedule.name
    part = table("schedule").build(job.parallel.schedule if name == "gpipe" else "1f1b")
    schedule = part.build(plan.pp, plan.microbatches, 1)
    ranks = plan.ends or plan.strategies[0]
    inner = ranks.dp * ranks.tp * ranks.cp
    split = job.parallel.model_copy(
        update={"dp": ranks.dp, "tp": ranks.tp, "cp": ranks.cp, "pp": plan.pp, "vpp": 1}
    )
    width = 2.0 if job.precision == "bf16" else 4.0
    cost = OpCosts(
        seconds={
            "F": tuple(stage.forward_s for stage in stages),
            "B": tuple(stage.backward_s for stage in stages),
        },
        boundary_bytes=plan.sequences * job.seq_len * hidden * width / inner,
    )
    links = MachineLinks(machine, split.attention())
    return simulate(schedule, cost, links).makespan + once


def plan_of(job: TrainJob, shape: ModelShape) -> LayerPlan:
    """The stages and strategies that a concrete job states; equal stages where it states none.

    Raises:
        PlanError: groups or stages that are not the model's.
    """
    split = job.parallel
    strategies: list[Strategy] = []
    for group in job.layers:
        dp, tp, cp = job.degrees(group)
        shard = (group.shard or job.shard).name
        again = (group.recompute or job.recompute) == "full"
        strategies += [Strategy(dp, tp, cp, shard, again)] * group.blocks
    if not job.layers:
        again = job.recompute != "none"
        strategies = [Strategy(split.dp, split.tp, split.cp, job.shard.name, again)]
        strategies *= shape.num_layers
    require(
        len(strategies) == shape.num_layers,
        "layers",
        f"{len(strategies)} blocks",
        expected=f"groups whose blocks add up to the {shape.num_layers} of {shape.name}",
        error=PlanError,
    )
    sequences = microbatch_of(job) * split.dp
    return LayerPlan(
        _cut(shape.num_layers, split.stages or _even(shape.num_layers, split.pp)),
        tuple(strategies),
        sequences,
        max(1, job.global_batch // sequences),
        Strategy(split.dp, split.tp, split.cp, job.shard.name) if job.layers_apart else None,
    )


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of equal stages, the first ones with one more where they do not divide."""
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def _cut(layers: int, sizes: Sequence[int]) -> tuple[range, ...]:
    require(
        sum(sizes) == layers,
        "parallel.stages",
        ", ".join(map(str, sizes)),
        expected=f"numbers that add up to {layers} blocks",
        error=PlanError,
    )
    ends = itertools.accumulate(sizes)
    return tuple(range(end - own, end) for own, end in zip(sizes, ends, strict=True))


def _terms(
    stages: Sequence[StageCost], plan: LayerPlan, job: TrainJob, pricer: LayerPricer
) -> dict[str, float]:
    """Seconds of a step by cause, those of the slowest stage's rank; they add up to the step."""
    step = simulated_s(stages, plan, job, pricer.machine, pricer.shape.hidden)
    m = plan.microbatches
    slowest = max(stages, key=lambda stage: m * stage.micro_s + stage.once_s)
    passes = [p for cost in slowest.layers for p in (cost.forward, cost.backward)]
    terms = {
        "matmul": m * sum(p.matmul for p in passes),
        "attention": m * sum(p.attention for p in passes),
        "memory": m * sum(p.memory for p in passes),
        "overhead": m * sum(cost.overhead_s for cost in slowest.layers),
        "optimizer": sum(cost.update_s for cost in slowest.layers),
        "collective": m * (sum(cost.wire_s for cost in slowest.layers) + slowest.change_s)
        + sum(cost.extra_s for cost in slowest.layers),
    }
    if plan.pp > 1:
        terms["collective"] += m * 2 * slowest.boundary_s
    used = sum(terms.values())
    terms["bubble"] = max(0.0, step - used)
    if used > step:  # sends that the simulator hides behind other micro-batches
        terms["collective"] -= used - step
    return terms


def estimate_layers(
    work: Work,
    machine: Machine,
    *,
    pricer: LayerPricer | None = None,
    layers: Sequence[ModelLayer] = (),
) -> Estimate:
    """Time, memory and traffic of one step of a job whose layers run in different ways.

    Args:
        work: the job, its ``layers`` and ``parallel.stages`` included.
        machine: what there is.
        pricer: of its layers; made if not given.
        layers: of the model; those of its shape if not given.
    """
    job, shape = work.job, work.shape
    plain = job.model_copy(
        update={"layers": (), "parallel": job.parallel.model_copy(update={"stages": ()})}
    )
    base = Pricer(machine).estimate(Work.model_construct(shape=shape, job=plain))
    plan = plan_of(job, shape)
    pricer = pricer or LayerPricer(job, machine, shape)
    layers = layers or layers_of(shape)
    stages = stage_costs(pricer, layers, plan)
    terms = _terms(stages, plan, job, pricer)
    if pricer.profile == LayerProfile():
        # Nothing of the layers was measured: the job costs what it would if all were alike, its
        # parts included, and what these layers take more or less.
        alike = plan_of(plain, shape)
        same = _terms(stage_costs(pricer, layers, alike), alike, plain, pricer)
        terms = {
            cause: max(0.0, base.terms_s[cause] + terms[cause] - same[cause]) for cause in same
        }
        terms["data"] = base.terms_s["data"]
    else:
        terms["data"] = base.terms_s["data"]
        terms["overhead"] += pricer.profile.step_s
    step = sum(terms.values())
    fullest = max(stages, key=lambda stage: stage.total_bytes(machine.device.kind))
    memory = fullest.memory_bytes
    memory["runtime"] = fullest.total_bytes(machine.device.kind) - sum(memory.values())
    ratio = step / base.step_s.value
    spread = base.step_s.high / base.step_s.value - 1.0
    interval = Interval.around(step, spread)
    groups = bounds_of(terms)
    return Estimate(
        step_s=interval,
        terms_s=terms,
        memory_bytes=memory,
        wire_bytes=base.wire_bytes,
        flops=base.flops,
        tokens=base.tokens,
        total_s=base.total_s and base.total_s.scaled(ratio),
        whole_s={cause: ratio * seconds for cause, seconds in base.whole_s.items()},
        energy_j=base.energy_j and base.energy_j.scaled(ratio),
        usd=base.usd and base.usd.scaled(ratio),
        bound=max(groups, key=lambda name: groups[name]),
    )
