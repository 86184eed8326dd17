"""What a whole training job costs, from what one of its steps takes: time, energy, money."""

from __future__ import annotations

import math

from shoal.ir import Interval, Machine, TrainJob

__all__ = ["energy_of", "occupied", "price_of", "saves_of", "steps_of", "total_of"]

# Steps between saves where the run itself chooses.
_AUTO_EVERY = 100


def steps_of(job: TrainJob) -> int | None:
    """Optimizer steps, if the job names them or its tokens."""
    if job.steps is not None:
        return job.steps
    if job.tokens is not None:
        return max(1, math.ceil(job.tokens / (job.global_batch * job.seq_len)))
    return None


def saves_of(job: TrainJob) -> int:
    """Checkpoints of a job, the one at its end included."""
    steps, every = steps_of(job), job.checkpoint.every
    every = _AUTO_EVERY if every == "auto" else every
    return 1 + (steps // every if steps and every else 0)


def total_of(job: TrainJob, step: Interval, ahead: float) -> Interval | None:
    """Seconds of all steps and of the evaluations between them.

    Args:
        job: how many of both.
        step: seconds of a step.
        ahead: share of a step that is its forward pass.
    """
    steps = steps_of(job)
    if steps is None:
        return None
    rounds = (steps // job.evaluation.every if job.evaluation.every else 0) + 1
    tokens = float(job.global_batch * job.seq_len)
    share = ahead * job.evaluation.tokens / tokens
    return step.scaled(steps + rounds * share)


def energy_of(machine: Machine, ranks: int, total: Interval | None) -> Interval | None:
    """Joules of devices and nodes; None where their power is unknown."""
    watts = machine.device.power_watts
    if watts is None or total is None:
        return None
    devices, nodes = occupied(machine, ranks)
    return total.scaled(watts * devices + machine.overhead_watts * nodes)


def price_of(machine: Machine, ranks: int, total: Interval | None) -> Interval | None:
    """Dollars of the devices; None where their price is unknown."""
    if machine.usd_per_device_hour is None or total is None:
        return None
    devices, _ = occupied(machine, ranks)
    return total.scaled(machine.usd_per_device_hour * devices / 3600.0)


def occupied(machine: Machine, ranks: int) -> tuple[int, int]:
    """Devices and nodes that ``ranks`` occupy."""
    if machine.device.kind == "cpu":
        nodes = min(machine.nodes, ranks)
        return nodes * machine.devices_per_node, nodes
    return ranks, math.ceil(ranks / machine.devices_per_node)
