"""Past predictions: how good they were, and what the next one is corrected by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import SerializeAsAny

from shoal.core.config import Value
from shoal.ir import Estimate, Job, Machine, TrainJob

__all__ = ["MIN_ROWS", "ErrorSummary", "ScoreRow", "calibrate", "machine_key", "summarise"]

# Past runs of a similar job from which a correction is made.
MIN_ROWS = 3


class ScoreRow(Value):
    """One quantity of one run.

    Args:
        recorded_s: when, seconds since 1970.
        name: name of the job.
        model: its model.
        machine: :func:`machine_key` of the machine.
        quantity: what was predicted and measured, such as ``step_s``.
        predicted: what the plan said; None if it said nothing.
        low: lower end of its 90 % interval.
        high: upper end.
        measured: what the run saw.
        device: kind of device it was measured on; empty where not recorded.
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
    job: SerializeAsAny[Job] | None = None

    @property
    def elsewhere(self) -> bool:
        """It was predicted for one kind of device and measured on another."""
        other = {"cpu": "gpu", "gpu": "cpu"}.get(self.device)
        return other is not None and f"|{other}|" in self.machine

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
    """How good the predictions of one quantity have been.

    Args:
        quantity: what was predicted.
        count: predictions.
        median: middle of measured / predicted - 1.
        median_abs: middle of its absolute value.
        p90_abs: its 90th percentile.
        inside: share of measurements within the 90 % interval; None without intervals.
    """

    quantity: str
    count: int
    median: float
    median_abs: float
    p90_abs: float
    inside: float | None = None


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
    """Median, 90th percentile and coverage of the errors of each quantity."""
    results = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        own = [row for row in rows if row.quantity == quantity]
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
            )
        )
    return results


def _similar(row: ScoreRow, job: TrainJob, model: str) -> bool:
    """The past job ran the same model the same way; batch and length may differ."""
    past = row.job
    return (
        isinstance(past, TrainJob)
        and row.model == model
        and past.precision == job.precision
        and past.parallel == job.parallel
        and past.compile == job.compile
        and past.recompute == job.recompute
        and past.optimizer.name == job.optimizer.name
    )


def calibrate(
    estimate: Estimate, rows: Sequence[ScoreRow], *, job: TrainJob, machine: Machine
) -> tuple[Estimate, str]:
    """An estimate corrected by the past errors of similar jobs on the same machine.

    With at least three such runs every time is multiplied by their median ratio of
    measured to *uncorrected* prediction, and the interval takes the spread of the
    ratios, widened for their small number. With fewer, nothing changes.

    Args:
        estimate: of ``job`` on ``machine``.
        rows: past rows, of any machine and quantity.
        job: the job.
        machine: the machine.

    Returns:
        The estimate, and a note that says what was done; empty if nothing was.
    """
    key = machine_key(machine)
    ratios = [
        row.measured / row.predicted
        for row in rows
        if row.quantity == "step_s"
        and row.machine == key
        and not row.elsewhere
        and row.predicted
        and row.measured > 0
        and _similar(row, job, job.model)
    ]
    if len(ratios) < MIN_ROWS:
        return estimate, ""
    logs = [math.log(ratio) for ratio in ratios]
    middle = _percentile(logs, 0.5)
    deviation = math.sqrt(sum((x - middle) ** 2 for x in logs) / (len(logs) - 1))
    # Student's t for a 90 % interval of one further run.
    quantile = {3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89}.get(len(logs), 1.75)
    half = max(0.02, quantile * deviation * math.sqrt(1 + 1 / len(logs)))
    bias = math.exp(middle)
    step = estimate.step_s.value * bias
    spread = math.exp(half) - 1
    change: dict[str, object] = {
        "step_s": type(estimate.step_s).around(step, spread),
        "terms_s": {cause: seconds * bias for cause, seconds in estimate.terms_s.items()},
    }
    for name in ("total_s", "energy_j", "usd"):
        interval = getattr(estimate, name)
        if interval is not None:
            change[name] = type(estimate.step_s).around(interval.value * bias, spread)
    note = (
        f"times x {bias:.2f} and interval +-{100 * spread:.0f} % by {len(ratios)} past runs of "
        "such a job on this machine"
    )
    return estimate.model_copy(update=change), note
