"""Instances that lend each other memory, on one virtual clock: what would it be worth?

Schedulers, block tables and loan registry are those of real instances; what differs is that steps,
copies and others' attention take predicted time. So a plan can say beforehand what a distributed
cache serves of a trace, beside instances that keep their memory to themselves.

Source: Lin et al., Infinite-LLM, 2024, section 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core.errors import ServeError, require
from shoal.cost.serving.simulator import (
    ServedRequest,
    SimulatedRunner,
    Simulation,
    StepRecord,
    request_of,
)
from shoal.cost.step_cost.lending import LendingStepCost
from shoal.ir import Arrival, KVManager, Request, Scheduler, SchedulerLimits, SchedulerPart, Step
from shoal.plan.batching.cache.borrowing import Borrower
from shoal.plan.batching.cache.distributed import (
    BlockLoan,
    Distributed,
    DistributedBlocks,
    place_of,
)
from shoal.plan.batching.cache.loans import LoanRegistry
from shoal.plan.batching.common import Queues, most_cached

# s until an instance that has nothing to compute looks again whether others lend.
_PAUSE_S = 2e-3


@dataclass
class LendingSimulation(Simulation):
    """What a simulation saw; ``served`` are requests that were let in.

    Args:
        refused: ids of those that all memory together would not hold.
        blocks_moved: copies to lenders.
        helped_tokens: tokens that were generated with parts of their contexts elsewhere.
        tokens_computed: tokens of all steps, those computed again too.
    """

    refused: list[str] = field(default_factory=list)
    blocks_moved: int = 0
    helped_tokens: int = 0
    tokens_computed: int = 0


class _Instance:
    """One instance: its objects, and copies that are under way until their time."""

    def __init__(
        self, number: int, kv: DistributedBlocks, scheduler: Scheduler, queues: Queues
    ) -> None:
        self.number, self.kv, self.scheduler = number, kv, scheduler
        self.borrower = Borrower(queues, kv, number)
        self.flights: list[tuple[float, BlockLoan]] = []
        self.asleep = True
        # s that others' attention has taken of it and that no step has had yet.
        self.taken_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)


class _World:
    """All instances and what happens when."""

    def __init__(
        self, instances: list[_Instance], registry: LoanRegistry, cost: LendingStepCost, lend: bool
    ) -> None:
        self.instances, self.registry, self.cost, self.lend = instances, registry, cost, lend
        self.seen = LendingSimulation()

    def advise(self, now: float) -> None:
        """Requests what the registry proposes from lenders at once."""
        if not self.lend:
            return
        for one in self.instances:
            self.registry.beat(one.borrower.beat(), now)
        for debt in self.registry.recalls():
            self.instances[debt.debtor].borrower.recall(debt.creditor, debt.blocks)
            self.give_back(self.instances[debt.debtor])
        for debt in self.registry.loans():
            granted = self.instances[debt.creditor].kv.lend(debt.debtor, debt.blocks)
            self.instances[debt.debtor].kv.credit(debt.creditor, granted)

    def give_back(self, one: _Instance) -> None:
        """Blocks that are no longer used."""
        for creditor, blocks in one.borrower.returns().items():
            self.instances[creditor].kv.take_back(one.number, blocks)

    def plan(self, one: _Instance, now: float) -> tuple[Step, float]:
        """A step, and s that it waits for copies."""
        for _, lend in [flight for flight in one.flights if flight[0] <= now]:
            one.kv.finish(lend)
        one.flights = [flight for flight in one.flights if flight[0] > now]
        if not one.flights:
            self.begin(one, one.borrower.lends(), now)
        self.give_back(one)
        step = one.scheduler.plan(now)
        waited = 0.0

        def room(request: Request, stop: int) -> int:
            nonlocal waited
            while True:
                backed, lends = one.borrower.missing(request, stop)
                if backed >= stop:
                    return stop
                self.begin(one, lends, now + waited)
                if not one.flights:
                    return backed
                at, lend = one.flights.pop(0)
                waited = max(waited, at - now)
                one.kv.finish(lend)

        fitted = one.borrower.fit(step, room)
        if step.chunks and not fitted.chunks:
            one.borrower.give_way()
        return fitted, waited

    def begin(self, one: _Instance, lends: Sequence[BlockLoan], now: float) -> None:
        """Copies follow one another."""
        at = max([now, *(over for over, _ in one.flights)])
        for lend in lends:
            at += self.cost.block_s
            one.flights.append((at, lend))
        self.seen.blocks_moved += len(lends)

    def seconds(self, one: _Instance, step: Step) -> float:
        """How long a step takes, what it takes of lenders put to their accounts."""
        away = []
        for chunk in step.chunks:
            parts: dict[int, int] = {}
            for number in chunk.request.blocks[: one.kv.remote(chunk.request)]:
                lender, _ = place_of(number)
                parts[lender] = parts.get(lender, 0) + one.kv.block_size
            away.append(parts)
            self.seen.helped_tokens += bool(parts) and chunk.length == 1
        shapes = [(chunk.start, chunk.length) for chunk in step.chunks]
        seconds, there = self.cost.spread(shapes, away)
        for lender, taken in there.items():
            self.instances[lender].taken_s += taken
        seconds += one.taken_s
        one.taken_s = 0.0
        return seconds


def simulate_lending(
    part: Distributed,
    kv_tokens: int,
    scheduler: SchedulerPart,
    limits: SchedulerLimits,
    cost: LendingStepCost,
    arrivals: Sequence[Arrival],
    *,
    lend: bool = True,
) -> LendingSimulation:
    """Serve ``arrivals`` in virtual time by instances that lend each other memory.

    Args:
        part: how many instances, and how they lend; a host lender is not simulated.
        kv_tokens: tokens of each instance's cache.
        scheduler: of each instance.
        limits: of each instance.
        cost: of steps, messages and copies.
        arrivals: what comes, in the order of time.
        lend: False for instances that keep their memory to themselves.

    Raises:
        ServeError: a scheduler whose requests cannot be computed again.
        ConfigError: an option that is not simulated.
    """
    require(
        part.host_tokens == 0,
        "kv.distributed.host_tokens",
        part.host_tokens,
        expected="0 in a simulation of instances",
    )
    instances = []
    for number in range(part.instances):
        kv = part.build(kv_tokens)
        made = scheduler.build(kv, limits)
        if not isinstance(made, Queues):
            raise ServeError(
                f"scheduler {type(made).__name__}: expected fcfs, fair or prefill_first with a "
                "distributed cache"
            )
        instances.append(_Instance(number, kv, made, made))
    lent = (instances[0].kv.num_blocks - instances[0].kv.watermark) * min(
        part.max_lenders, part.instances - 1
    )
    for one in instances:
        one.kv.lendable = lent if lend else 0
    ledger = LoanRegistry(
        part.instances,
        part.block_size,
        cost,
        timeout_s=part.timeout_s,
        max_lenders=part.max_lenders,
    )
    world = _World(instances, ledger, cost, lend)
    _run(world, arrivals, limits)
    return world.seen


def _run(world: _World, arrivals: Sequence[Arrival], limits: SchedulerLimits) -> None:
    runner = SimulatedRunner(world.cost)
    live: dict[str, tuple[Request, ServedRequest, int]] = {}
    # (time, order, what): arrivals by number, then turns of instances and ends of their steps.
    events: list[tuple[float, int, int, Step | None]] = []
    order = 0

    def push(at: float, instance: int, step: Step | None = None) -> None:
        nonlocal order
        heapq.heappush(events, (at, order, instance, step))
        order += 1

    for index, arrival in enumerate(arrivals):
        push(arrival.at, -1 - index)
    while events:
        now, _, who, step = heapq.heappop(events)
        if who < 0:
            _arrive(world, live, arrivals[-1 - who], str(-1 - who), limits)
        elif step is not None:
            one = world.instances[who]
            result = runner.execute(step)
            for output in one.scheduler.commit(step, result, now):
                request, served, _ = live[output.request_id]
                if served.n_output == 0:
                    served.first, served.n_cached = now, request.n_cached
                served.n_output += len(output.tokens)
                if output.finish is not None:
                    served.finish, served.preemptions = now, request.preemptions
                    del live[output.request_id]
            world.give_back(one)
            push(now, who)
            continue
        else:
            one = world.instances[who]
            world.advise(now)
            planned, waited = world.plan(one, now)
            if planned.chunks:
                tokens, preempted = planned.num_tokens, len(planned.preempted)
                seconds = waited + world.seconds(one, planned)
                world.seen.tokens_computed += tokens
                world.seen.steps.append(
                    StepRecord(now, seconds, len(planned.chunks), tokens, preempted)
                )
                world.seen.busy_s += seconds / len(world.instances)
                push(now + seconds, who, planned)
            elif one.busy and (one.flights or any(other.busy for other in world.instances)):
                push(max(now + _PAUSE_S, events[0][0] if events else now), who)
            else:
                one.asleep = True
        for one in world.instances:
            if one.asleep and one.busy:
                one.asleep = False
                push(now, one.number)


def _arrive(
    world: _World,
    live: dict[str, tuple[Request, ServedRequest, int]],
    arrival: Arrival,
    name: str,
    limits: SchedulerLimits,
) -> None:
    """To the instance with the fewest tokens to do, unless none ever has room for it."""
    loads = [0] * len(world.instances)
    for request, _, place in live.values():
        loads[place] += len(request.tokens)
    place = min(range(len(loads)), key=loads.__getitem__)
    request = request_of(name, arrival)
    kv: KVManager = world.instances[place].kv
    if not kv.fits(most_cached(request, limits.max_position)):
        world.seen.refused.append(name)
        return
    world.instances[place].scheduler.add(request)
    served = ServedRequest(name, arrival.at, request.n_prompt)
    world.seen.served.append(served)
    live[name] = request, served, place
