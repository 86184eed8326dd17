"""Past predictions and how good they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import SerializeAsAny

from shoal.core.config import Value
from shoal.cost.score_rules import measured_elsewhere
from shoal.ir import Job, Machine


class ScoreRow(Value):
    """One quantity of one run.

    Args:
        recorded_s: when, seconds since 1970.
        name: name of the job.
        model: its model.
        machine: :func:`machine_key` of the machine.
        quantity: what was predicted and measured, such as ``step_s``.
        predicted: value in the plan; None if it has none.
        low: lower end of its 90 % interval.
        high: upper end.
        measured: what the run saw.
        device: kind of device it was measured on; empty where not recorded.
        left_out: why it does not count; empty where it does.
        kind: kind of job; empty where not recorded.
        job: the job.
    """

    recorded_s: float
    name: str
    model: str
    machine: str
    quantity: str
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float
    device: str = ""
    left_out: str = ""
    kind: str = ""
    job: SerializeAsAny[Job] | None = None

    @property
    def elsewhere(self) -> bool:
        """It was predicted for one kind of device and measured on another."""
        return measured_elsewhere(self.device, self.machine)

    @property
    def error(self) -> float | None:
        """Measured / predicted - 1; None without a prediction of what was measured."""
        known = self.predicted and not self.elsewhere
        return self.measured / self.predicted - 1 if known and self.predicted else None

    @property
    def inside(self) -> bool | None:
        """The measurement lies in the predicted interval; None without an interval for it."""
        if self.low is None or self.high is None or self.elsewhere:
            return None
        return self.low <= self.measured <= self.high


class ErrorSummary(Value):
    """How good the predictions of one quantity of a kind of job have been.

    Args:
        quantity: what was predicted.
        count: predictions.
        median: middle of measured / predicted - 1.
        median_abs: middle of its absolute value.
        p90_abs: its 90th percentile.
        inside: share of measurements within the 90 % interval; None without intervals.
        kind: kind of job; empty where not recorded.
    """

    quantity: str
    count: int
    median: float
    median_abs: float
    p90_abs: float
    inside: float | None = None
    kind: str = ""


def machine_key(machine: Machine) -> str:
    """What makes two machines the same for the score: CPU or GPU, counts, not versions."""
    device = machine.device
    model = machine.fingerprint.get("cpu_model", device.name)
    return f"{model}|{device.kind}|{device.num_cores or 0}|{machine.num_devices}"


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarise(rows: Sequence[ScoreRow]) -> list[ErrorSummary]:
    """Median, 90th percentile and coverage of the errors of each quantity of each kind of job."""
    results = []
    groups: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.quantity), []).append(row)
    for (kind, quantity), own in groups.items():
        errors = [row.error for row in own if row.error is not None]
        if not errors:
            continue
        inside = [row.inside for row in own if row.inside is not None]
        sizes = [abs(error) for error in errors]
        results.append(
            ErrorSummary(
                quantity=quantity,
                count=len(errors),
                median=_percentile(errors, 0.5),
                median_abs=_percentile(sizes, 0.5),
                p90_abs=_percentile(sizes, 0.9),
                inside=sum(inside) / len(inside) if inside else None,
                kind=kind,
            )
        )
    return results
