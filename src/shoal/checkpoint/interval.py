"""How often to save: often enough to lose little, seldom enough to cost little.

A plan prices the interval of :func:`shoal.cost.training.failures.daly` with failures as others have
seen them; a run takes it from the failures and the stalls that it sees itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import require
from shoal.cost.training.failures import daly

FIRST_STEPS = 5
"""Steps after which the first save is made, whose stall is not known yet."""

# One failure a day of a machine that has shown none: half a failure is assumed beside those seen.
_PRIOR_FAILURES = 0.5
_PRIOR_S = 0.5 * 86_400.0
# A stall too short to be measured is at least this.
_LEAST_STALL_S = 1e-3


@dataclass(frozen=True, slots=True)
class CheckpointInterval:
    """What was chosen, and from what.

    Args:
        steps: between two saves.
        seconds: the same at the measured time of a step.
        stall_s: that one save holds training up.
        mtbf_s: mean time between failures.
        overhead: share of the time that is lost, saving and failures together.
    """

    steps: int
    seconds: float
    stall_s: float
    mtbf_s: float
    overhead: float


def choose(
    *, stall_s: float, step_s: float, failures: int, observed_s: float
) -> CheckpointInterval:
    """The interval in steps, from what was seen so far.

    Args:
        stall_s: seconds that one save holds training up.
        step_s: seconds of a step.
        failures: seen in ``observed_s`` seconds.
        observed_s: how long the run has been watched.
    """
    require(step_s > 0, "step_s", step_s, expected="a number above 0")
    mtbf_s = (observed_s + _PRIOR_S) / (failures + _PRIOR_FAILURES)
    stall_s = max(stall_s, _LEAST_STALL_S)
    steps = max(1, round(daly(stall_s, mtbf_s) / step_s))
    seconds = steps * step_s
    overhead = stall_s / seconds + seconds / (2 * mtbf_s)
    return CheckpointInterval(steps, seconds, stall_s, mtbf_s, overhead)


def failures_seen(events: Iterable[Mapping[str, Any]]) -> tuple[int, float]:
    """Failures of a run and the seconds in which they were seen, from its events.

    A start that goes on where no stop or end was written follows a failure.
    """
    failures, begun, seconds, last = 0, False, 0.0, None
    for event in events:
        if event["kind"] == "start":
            failures += begun
            begun, last = True, None
        elif event["kind"] in ("stop", "end"):
            begun = False
        # Events of before there was a monotonic clock in them have the wall clock alone.
        now = float(event.get("monotonic_s", event.get("time", 0.0)))
        if last is not None:
            seconds += max(0.0, now - last)
        last = now
    return failures, seconds
