"""Plans of mining, and the choice of a miner: one price for both."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.fields.data.mine.baskets import Baskets
from shoal.fields.data.mine.inputs import num_bytes_of, shards_of, together
from shoal.fields.data.mine.job import MineJob, MinePlan
from shoal.fields.data.mine.miners.costs import (
    CAREFUL,
    QUICK,
    rates_here,
    rates_of,
    shape_of,
    this_machine,
)
from shoal.fields.data.mine.protocols import (
    NO_LIMIT,
    MineError,
    Miner,
    MineWork,
    MiningProblem,
    least_support,
)
from shoal.fields.data.sources import SHARD_BYTES
from shoal.ir import Estimate, Interval, Machine

# The interpreter with numpy and Arrow; Arrow's own copy of the items, as names.
_RUNTIME, _NAMED = 2.5e8, 16.0
# Share of the frequent sets of a shard that are not frequent in all, and are counted again.
_SPARE = 0.3
# Bytes that a process reads and numbers in a second.
_READ = 0.15e9


def choose_miner(problem: MiningProblem) -> Miner:
    """The miner that is expected to be the fastest here, by the shape of the data.

    A sample of the baskets is mined by each; see :mod:`~shoal.fields.data.mine.miners.costs`.
    """
    machine = this_machine()
    work = shape_of(problem, rates_here(), QUICK)
    return min(offered(work, machine), key=lambda one: one[1].step_s.value)[0]


def offered(work: MineWork, machine: Machine) -> Iterator[tuple[Miner, Estimate]]:
    """Every miner in every way that it offers, with its price."""
    miners = table("miner")
    for name in miners:
        for miner in miners.build(name).candidates(work, machine):
            yield miner, miner.estimate(work, machine)


def plan_mine(job: MineJob, machine: Machine) -> list[MinePlan]:
    """The ways to do it, the fastest first.

    Raises:
        PlanError: nothing fits in the machine's memory.
        MineError: the job asks for what there cannot be.
        DataError: the data cannot be read.
    """
    check(job)
    baskets, total = _some(job)
    least = least_support(job.min_support, total)
    problem = MiningProblem(
        baskets, least, target=job.target, max_len=job.max_len, max_itemsets=NO_LIMIT
    )
    work = shape_of(problem, rates_of(machine), CAREFUL, total)
    if job.method is None:
        priced = list(offered(work, machine))
    else:
        miner = table("miner").build(job.method, where="method")
        priced = [(miner, miner.estimate(work, machine))]
    plans = [_plan(job, machine, work, *one) for one in priced]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        needed = min(plan.predicted["memory_bytes"].value for plan in plans)
        raise PlanError(
            f"{job.data} on {machine.name}: {human_bytes(needed)} are needed; give "
            "--set sharded=true, a larger min_support, or max_len"
        )
    return sorted(fitting, key=lambda plan: plan.predicted["total_s"].value)


def check(job: MineJob) -> None:
    """Refuse what does not go together.

    Raises:
        MineError: rules of closed or maximal sets.
    """
    if job.min_confidence is not None and job.target != "all":
        raise MineError(
            f"min_confidence: rules need all frequent sets: target = all, not {job.target}"
        )


def _some(job: MineJob) -> tuple[Baskets, int]:
    """The first baskets of a job, and about how many there are."""
    shards = shards_of(job)
    baskets = together(shards[:1])
    return baskets, baskets.num_baskets * len(shards)


def _plan(job: MineJob, machine: Machine, work: MineWork, miner: Miner, cost: Estimate) -> MinePlan:
    share = 1.0
    if job.sharded and num_bytes_of(job):
        share = min(1.0, job.workers * SHARD_BYTES / num_bytes_of(job))
    named = _NAMED * work.entries
    memory = _RUNTIME + share * (cost.memory_total + named)
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("miner").spell(miner)
    workers = max(1, min(job.workers, machine.device.num_cores or job.workers))
    seconds = cost.step_s
    if job.sharded:
        again = 2.0 * num_bytes_of(job) / _READ + _SPARE * seconds.value
        seconds = Interval.around((seconds.value + again) / workers, work.rates.spread)
    basis = "timed on this machine" if work.rates.measured else "of a core of a server"
    notes = [f"rates {basis}; operations counted on a sample of {work.sample:,} baskets"]
    if work.capped:
        notes.append("the sample has so many sets that a higher support was taken: a lower bound")
    return MinePlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "memory_bytes": Interval.around(memory, 0.5),
            "itemsets": Interval.around(work.wanted, 3.0 if work.capped else 0.5),
        },
        planner="miners",
        fits=not capacity or memory <= capacity,
        why=(
            f"{spelled}: {work.num_baskets:,} baskets with {work.mean_len:.3g} of "
            f"{work.num_items:,} frequent items each, sets of up to {work.depth} items"
        ),
        notes=tuple(notes),
        num_baskets=work.num_baskets,
        least=work.least,
    )
