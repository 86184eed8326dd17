"""A serving job in virtual time: its scheduler, its steps' seconds, the requests it serves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.cost.price.host_link import host_link
from shoal.cost.price.rates import RankRates
from shoal.cost.serving.fleet import SimulatedInstance, simulate_fleet
from shoal.cost.serving.simulator import (
    Simulation,
    Speculation,
    quantities,
    simulate,
    simulate_ahead,
    stretched,
)
from shoal.cost.shapes import resolve
from shoal.cost.step_cost.lending import LendingStepCost
from shoal.cost.step_cost.predicted import PredictedStepCost, predicted_step_cost
from shoal.ir import (
    Arrival,
    CountedKVPart,
    CountedStepCost,
    HostLink,
    KVManager,
    Machine,
    Parallel,
    Scheduler,
    ServeJob,
    StepCost,
)
from shoal.plan.batching.balanced import Balanced
from shoal.plan.batching.cache.distributed import Distributed
from shoal.plan.batching.common import Queues
from shoal.plan.batching.schedulers.ahead import AheadScheduler, OpenScheduler
from shoal.plan.serving.diffusion import simulate_passes
from shoal.plan.serving.inputs import precision_of
from shoal.plan.serving.lending import simulate_lending
from shoal.plan.serving.memory import block_size, expectation, head_bytes
from shoal.plan.trees.drafting import PredictedRows, ProfitableDrafting

# A message to a process of the same host and its answer, s.
HOP_S = 1e-4


def counts_blocks(job: ServeJob, arrivals: Sequence[Arrival]) -> bool:
    """Whether counting a cache's blocks is enough: no requests start alike, none is swapped."""
    part = table("kv").build(job.kv, where="kv")
    if "swaps_cache" in traits("preempt", job.preempt) or not isinstance(part, CountedKVPart):
        return False
    size = block_size(job)
    # A simulation generates token 0.
    starts = {(*one.prompt[:size], *[0] * (size - len(one.prompt))) for one in arrivals}
    return len(starts) == len(arrivals)


def blank(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The arrivals with prompts of zeros, faster to copy, for caches that count blocks alone."""
    return [replace(one, prompt=(0,) * len(one.prompt)) for one in arrivals]


def build_cache(job: ServeJob, num_tokens: int, *, counted: bool = False) -> KVManager:
    """The bookkeeping of a job's cache of ``num_tokens``, see :func:`counts_blocks`."""
    part = table("kv").build(job.kv, where="kv")
    kv: KVManager = part.build_counted(num_tokens) if counted else part.build(num_tokens)
    return kv


def build_scheduler(
    job: ServeJob,
    *,
    link: HostLink | None = None,
    cost: StepCost | None = None,
    counted: bool = False,
) -> Scheduler:
    """The scheduler of a concrete job, with its bookkeeping and without requests.

    Args:
        job: with ``kv_tokens`` and ``max_position``.
        link: between cache and host, where it is known.
        cost: seconds of a step, for ``preempt = auto``.
        counted: see :func:`counts_blocks`.

    Raises:
        PlanError: the job leaves ``kv_tokens`` or ``max_position`` open.
        ConfigError: an option of a part is wrong.
    """
    if job.kv_tokens is None or job.max_position is None:
        raise PlanError(
            "kv_tokens and max_position: expected numbers in the job of a scheduler; plan it first"
        )
    kv = build_cache(job, job.kv_tokens, counted=counted)
    preemption = (
        table("preempt")
        .build(job.preempt, where="preempt")
        .build(kv, job.limits, host_tokens=job.host_tokens_of(job.kv_tokens), link=link, cost=cost)
    )
    part = table("scheduler").build(job.scheduler, where="scheduler")
    scheduler: Scheduler = part.build(kv, job.limits, preemption)
    return scheduler


def simulate_plan(
    job: ServeJob, machine: Machine, cost: StepCost, arrivals: Sequence[Arrival]
) -> Simulation:
    """Serve ``arrivals`` in virtual time, as a concrete job says.

    Args:
        job: with ``kv_tokens``, ``max_position`` and a precision.
        machine: between whose memories caches are swapped.
        cost: seconds of a step.
        arrivals: what comes.

    Raises:
        PlanError: the job leaves a limit open.
        ServeError: a request that can never run.
    """
    link = host_link(machine, resolve(job.model), job.precision, block_size(job))
    split = job.parallel
    if split.dp > 1:
        # One queue stands for those of all groups, which are evenly full.
        limits = {key: split.dp * getattr(job, key) for key in ("max_running", "max_step_tokens")}
        job = job.model_copy(update=limits)
    if "whole_blocks" in traits("decode", job.decode):
        return simulate_passes(job, cost, arrivals)
    if "lends_blocks" in traits("kv", job.kv):
        return _lending(job, cost, arrivals, link)
    counted = counts_blocks(job, arrivals)
    if job.replicas > 1:
        balancer = table("balancer").build(job.balancer, where="balancer").build()
        replicas = [
            SimulatedInstance(build_scheduler(job, cost=cost, counted=counted), cost)
            for _ in range(job.replicas)
        ]
        dispatcher = Balanced(balancer, job.replicas, arrivals)
        fleet = simulate_fleet(replicas, [], dispatcher, arrivals)
        return Simulation(fleet.served, busy_s=sum(fleet.busy_s) / job.replicas)
    if counted:
        arrivals = blank(arrivals)
    scheduler = build_scheduler(job, link=link, cost=cost, counted=counted)
    if split.pp == split.depth == 1:
        speculation = guessing(job, machine)
        if speculation is not None:
            assert isinstance(scheduler, Queues)
            context = round(sum(len(one.prompt) for one in arrivals) / len(arrivals))
            costs = PredictedRows(cost, context, speculation.guess_s)
            scheduler.drafting = ProfitableDrafting(speculation.tokens, costs)
        return simulate(scheduler, cost, arrivals, link=link, speculation=speculation)
    ahead = AheadScheduler(cast(OpenScheduler, scheduler), split.depth)
    return simulate_ahead(scheduler, ahead, cost, arrivals, stages=split.pp)


def at_pace(
    job: ServeJob,
    machine: Machine,
    cost: StepCost,
    arrivals: Sequence[Arrival],
    seen: Simulation,
    factor: float,
) -> dict[str, float]:
    """The quantities of :func:`simulate_plan` if every step takes ``factor`` times as long.

    Where all requests are there from the beginning and no part looks at the clock, the steps are
    those of ``seen``, which it saw of the same arguments; elsewhere it is simulated again.
    """
    one_engine = (
        job.replicas == 1
        and "lends_blocks" not in traits("kv", job.kv)
        and "whole_blocks" not in traits("decode", job.decode)
    )
    same_steps = (
        one_engine
        and job.speculative is None
        and all(one.at <= 0.0 for one in arrivals)
        and all(
            "reads_no_clock" in traits(key, getattr(job, key)) for key in ("scheduler", "preempt")
        )
    )
    if same_steps:
        return quantities(stretched(seen, factor, stages=job.parallel.pp))
    paced = _CountedAtPace if isinstance(cost, CountedStepCost) else _AtPace
    return simulate_plan(job, machine, paced(cost, factor), arrivals).quantities()


@dataclass(frozen=True)
class _AtPace:
    """A cost times a factor."""

    cost: StepCost
    factor: float

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.factor * self.cost.seconds(chunks)


class _CountedAtPace(_AtPace):
    def counted_seconds(
        self, chunks: Sequence[tuple[int, int]], decodes: int, contexts: int
    ) -> float:
        assert isinstance(self.cost, CountedStepCost)
        return self.factor * self.cost.counted_seconds(chunks, decodes, contexts)


def guessing(job: ServeJob, machine: Machine) -> Speculation | None:
    """What guesses of a job's drafter give, and the seconds in which its weights are read.

    Raises:
        ShoalError: the drafter's files are missing or damaged.
    """
    if job.speculative is None:
        return None
    result = expectation(job)
    assert result is not None
    rate = RankRates(machine, Parallel(), job.threads).stream_curve()(max(1.0, result.weight_bytes))
    return Speculation(result.tokens, result.reads * result.weight_bytes / rate)


def _lending(
    job: ServeJob, cost: StepCost, arrivals: Sequence[Arrival], link: HostLink
) -> Simulation:
    """Instances that lend each other memory, each with ``kv_tokens`` of its own."""
    part = table("kv").build(job.kv, where="kv")
    assert isinstance(part, Distributed)
    assert job.kv_tokens is not None
    block_s = link.copy_s + link.block_bytes / link.bytes_per_s
    lent = LendingStepCost(cost=cost, layers=link.layers, hop_s=HOP_S, block_s=block_s)
    scheduler = table("scheduler").build(job.scheduler, where="scheduler")
    return simulate_lending(part, job.kv_tokens, scheduler, job.limits, lent, arrivals)


def step_cost_of(job: ServeJob, machine: Machine) -> PredictedStepCost:
    """Seconds of a step of a job, split as it says, predicted from the machine's rates."""
    split = job.parallel
    return _predicted(job, machine, split.tp, split.pp, split.dp, split.ep)


def sharded_costs(job: ServeJob, machine: Machine) -> Callable[[int, int], PredictedStepCost]:
    """(tp, pp) -> seconds of a step on that many devices, predicted from the machine's rates.

    Args:
        job: the model, its precision, and the engine that runs it.
        machine: what the devices are; an instance stays on links between devices if it can.
    """
    return functools.cache(lambda tp, pp: _predicted(job, machine, tp, pp))


def _predicted(
    job: ServeJob, machine: Machine, tp: int, pp: int, dp: int = 1, ep: int = 1
) -> PredictedStepCost:
    shape, precision = resolve(job.model), precision_of(job)
    return predicted_step_cost(
        machine,
        shape,
        precision,
        job.threads,
        engine=job.engine,
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        # Ranks of a CPU share it; devices of their own are those of the machine.
        ranks=tp * pp * job.replicas,
        weights=job.weights,
        head_bytes=head_bytes(job, shape, precision),
    )
