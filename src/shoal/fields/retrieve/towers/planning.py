"""Plans of towers: seconds, memory, and the time to encode a query, of each way to train."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.parts import Choice, table
from shoal.fields.retrieve.towers.job import TrainTowersJob, TrainTowersPlan
from shoal.fields.retrieve.towers.pairs import PairSplit, num_pairs, read_pairs, split_pairs
from shoal.fields.retrieve.towers.protocols import TowerTraining
from shoal.fields.retrieve.towers.rates import TowerRates, tower_rates
from shoal.ir import Interval, Machine

# The interpreter with torch.
_RUNTIME = 4.5e8
# Further queries of this machine beside pairs that are drawn, as they were counted once.
_LOOSE = 117_000


def split_of(job: TrainTowersJob) -> PairSplit:
    """What is learned from and judged by.

    Raises:
        DataError: it cannot be read.
        TowerError: too few pairs, or one on both sides.
    """
    return split_pairs(read_pairs(job.data, seed=job.seed), job.held)


def plan_towers(job: TrainTowersJob, machine: Machine) -> list[TrainTowersPlan]:
    """A plan of each way, in the order of the table.

    Raises:
        ShoalError: the pairs cannot be read, or a backbone cannot be a tower.
    """
    count, loose = num_pairs(job.data), _LOOSE
    if count is None:
        train = split_of(job).train
        count, loose = len(train), len(train.unlabelled)
    else:
        count -= 2 * job.held
    rates = tower_rates(machine, job.precision)
    return [_plan(job, machine, choice, count, loose, rates) for choice in _methods(job)]


def _methods(job: TrainTowersJob) -> Iterator[Choice]:
    if job.method is not None:
        yield job.method
        return
    for name in table("tower_training"):
        yield Choice(name=name)


def _plan(
    job: TrainTowersJob,
    machine: Machine,
    choice: Choice,
    pairs: int,
    loose: int,
    rates: TowerRates,
) -> TrainTowersPlan:
    method: TowerTraining = table("tower_training").build(choice, where="method")
    cost = method.estimate(job.task(), max(pairs, 2), loose, rates)
    cores = min(job.ranks * job.threads, machine.device.num_cores or 1)
    memory = _RUNTIME + cost.memory_bytes
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("tower_training").spell(method)
    return TrainTowersPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "train_s": Interval.around(cost.train_s / cores, rates.spread),
            "query_s": Interval.around(cost.query_s, rates.spread),
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="rates of this machine",
        fits=not capacity or job.ranks * memory <= capacity,
        why=f"{spelled}: {cost.parameters:,} parameters learn from {pairs:,} pairs",
        notes=("texts are taken to be as long as the limits",),
        pairs=max(pairs, 0),
        unlabelled=loose,
    )
