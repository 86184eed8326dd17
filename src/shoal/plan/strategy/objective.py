"""What the best plan is best at: time, money or energy.

A job under two plans does the same steps, so the price and the energy of one step compare them.
"""

from __future__ import annotations

from shoal.core.errors import PlanError
from shoal.cost.training.totals import occupied
from shoal.ir import Machine, TrainJob

UNITS = {"time": "s", "cost": "USD", "energy": "J"}
"""Objective -> unit of what :func:`worth` gives for a step."""


def check_objective(job: TrainJob, machine: Machine) -> None:
    """Refuse an objective for which the machine has no numbers.

    Raises:
        PlanError: names the field that is missing.
    """
    missing = {
        "cost": ("usd_per_device_hour", "a price", machine.usd_per_device_hour),
        "energy": ("device.power_watts", "a draw in W", machine.device.power_watts),
    }
    if job.objective not in missing:
        return
    field, what, given = missing[job.objective]
    if given is None:
        raise PlanError(
            f"objective = {job.objective}: machine {machine.name} has no {field}; "
            f"describe {what} in its YAML file, or plan for time"
        )


def worth(job: TrainJob, machine: Machine, seconds: float) -> float:
    """What the job's objective wants small, of a step of so many seconds, in its unit.

    The objective has been checked with :func:`check_objective`.
    """
    if job.objective == "time":
        return seconds
    devices, nodes = occupied(machine, job.parallel.world)
    if job.objective == "cost":
        return seconds * devices * (machine.usd_per_device_hour or 0.0) / 3600.0
    watts = devices * (machine.device.power_watts or 0.0) + nodes * machine.overhead_watts
    return seconds * watts
