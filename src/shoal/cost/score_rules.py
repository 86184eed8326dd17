"""Which measurements say how good a prediction was, and why the others are left out.

A run counts once: when it has gone to its end under the plan that was priced. What is left out is
kept, with the reason, and shown on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Of a run with fewer steps most are warm-up: page faults, thread pools, compilation.
FEWEST_STEPS = 10
# Quantities that follow from how long steps take.
_OF_STEPS = frozenset({"step_s", "tokens_per_s", "total_s"})


class RunFacts(NamedTuple):
    """What of a report decides whether it counts.

    Args:
        number: of the report.
        group: id of the run's directory; kind, name and model of the job where that is not known.
        device: kind of device it was measured on; empty where not recorded.
        machine: :func:`~shoal.cost.score_rows.machine_key` of the plan's machine.
        plans: plans that it ran under, one after the other.
        minutes: wall time that its number of steps was taken from; None for another length.
        measured: quantity -> value.
    """

    number: int
    group: str
    device: str
    machine: str
    plans: int
    minutes: float | None
    measured: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """It went to its end, as far as is known: kinds without steps do not say so."""
        return bool(self.measured.get("finished", 1.0))

    @property
    def starts(self) -> float:
        """How often it was started; 0 where that is not recorded."""
        return float(self.measured.get("starts") or 0.0)


def measured_elsewhere(device: str, machine: str) -> bool:
    """Measured on another kind of device than the one of the machine that was planned for."""
    other = {"cpu": "gpu", "gpu": "cpu"}.get(device)
    return other is not None and f"|{other}|" in machine


def left_out(run: RunFacts, before: Sequence[RunFacts]) -> str:
    """Why nothing of a report counts; empty where it does.

    Args:
        run: the report.
        before: earlier reports of its group, oldest first.
    """
    if measured_elsewhere(run.device, run.machine):
        return f"measured on a {run.device.upper()}, predicted for another kind of device"
    same = (run.machine, run.device, run.measured)
    if any((one.machine, one.device, one.measured) == same for one in before):
        return "the same measurements were recorded before"
    if not run.finished:
        return "stopped before its last step"
    if run.plans > 1:
        return "resumed with another plan"
    ended = 0.0  # starts of the run when it first came to its end
    for one in before:
        if one.starts <= ended:  # a new run in the place of another
            ended = 0.0
        if one.finished:
            ended = ended or one.starts
    if 0 < ended < run.starts:
        return "resumed after its end, and already counted"
    return ""


def quantity_left_out(run: RunFacts, quantity: str) -> str:
    """Why one quantity of a report that counts does not; empty where it does."""
    steps = run.measured.get("steps")
    if quantity in _OF_STEPS and steps is not None and steps < FEWEST_STEPS:
        return f"{steps:.0f} steps are mostly warm-up; {FEWEST_STEPS} or more count"
    if quantity == "total_s" and run.minutes is not None:
        return "--minutes sets the number of steps, so the total repeats the step time"
    return ""
