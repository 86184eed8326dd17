"""What a whole training job costs, from what one of its steps takes: time, energy, money."""

from __future__ import annotations

import math

from shoal.cost.training.failures import Saving, failures_s
from shoal.ir import Interval, Machine, TrainJob


def steps_of(job: TrainJob) -> int | None:
    """Optimizer steps, if the job names them or its tokens."""
    if job.steps is not None:
        return job.steps
    if job.tokens is not None:
        return max(1, math.ceil(job.tokens / (job.global_batch * job.seq_len)))
    return None


def whole_of(job: TrainJob, step_s: float, ahead: float, saving: Saving) -> dict[str, float]:
    """Cause -> seconds of a whole job: steps, evaluation, saves, failures; empty without a length.

    Args:
        job: how many steps and evaluations.
        step_s: seconds of a step.
        ahead: share of a step that is its forward pass.
        saving: how it saves; a save at the end is counted in any case.
    """
    steps = steps_of(job)
    if steps is None:
        return {}
    rounds = (steps // job.evaluation.every if job.evaluation.every else 0) + 1
    tokens = float(job.global_batch * job.seq_len)
    saves = 1 + (steps // saving.every if saving.every else 0)
    result = {
        "steps": steps * step_s,
        "evaluation": rounds * ahead * job.evaluation.tokens / tokens * step_s,
        "saves": saves * saving.stall_s,
    }
    return {**result, "failures": failures_s(saving, sum(result.values()), step_s)}


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
