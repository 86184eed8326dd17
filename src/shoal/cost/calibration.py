"""Corrections of predicted times by what the user's own runs took; one run is enough.

The logarithm of measured over predicted time of a run is a sum of three normal errors: one that all
runs of an engine on a machine share, one that all runs of a model there share, and the rest. Their
variances are shares of the squared width of the prediction's own interval, by how far off published
runs were (:mod:`shoal.cost.published.shared`). The correction is the posterior mean: near 1 after
one run, nearer to what was measured with each further one. Runs of the same job count as one. The
interval takes the posterior's width. Memory is never corrected.

Source: Gelman and Hill, Data Analysis Using Regression and Multilevel Models, 2007, chapter 12.
"""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from shoal.core.config import Value, parse
from shoal.core.errors import ShoalError, StoreError
from shoal.core.files import parse_yaml, shoal_home, write_json
from shoal.core.tables import Table, table_of
from shoal.cost.score import Score
from shoal.cost.score_rows import machine_key
from shoal.ir import Correction, Estimate, Interval, Machine, Report, ServePlan, predictions

VERSION = 1
"""Version of the file that this module reads and writes."""


class Shares(NamedTuple):
    """Shares of the variance of a logarithmic error.

    Args:
        machine: that runs of any two models on a machine have in common.
        model: that two runs of one model on a machine have in common.
    """

    machine: float
    model: float


# By shoal.cost.published.shared. Latencies of different models on a device have nothing in common.
SHARES = {"step_s": Shares(0.12, 0.70), "tpot": Shares(0.0, 0.42), "ttft": Shares(0.0, 0.56)}
# What a run measures, the best first.
_MEASURED = {
    "step_s": ("step_s",),
    "tpot": ("tpot_p50_s", "tpot_mean_s"),
    "ttft": ("ttft_p50_s", "ttft_mean_s"),
}
# Standard deviations to either end of a 90 % interval.
_Z90 = 1.645
# Of a prediction without an interval: 26 % (shoal.cost.training.step.GPU_SPREAD).
_USUAL = math.log(1.26) / _Z90
# Runs as which the published spread of one model's runs counts beside the user's own.
_PUBLISHED_RUNS = 4
# A prediction and a measurement that are further apart are not of one job, or of one unit.
_APART = 10.0


def pooled(
    logs: Mapping[str, Sequence[float]], model: str, shares: Shares, sd: float = _USUAL
) -> tuple[float, float]:
    """(logarithm of the factor of a model's times, width of its interval over the usual one).

    Args:
        logs: model -> logarithms of measured over predicted, one a job; not empty.
        model: the model, of which there may be none.
        shares: of the variance.
        sd: standard deviation of a logarithm before anything is measured.
    """
    whole, own, rest = shares.machine, shares.model - shares.machine, 1.0 - shares.model
    means = {name: fmean(values) for name, values in logs.items()}
    if more := sum(map(len, logs.values())) - len(logs):
        # The user's own runs may differ by more than published ones, or by less.
        squares = sum((x - means[name]) ** 2 for name, values in logs.items() for x in values)
        rest = (_PUBLISHED_RUNS * rest + squares / sd**2) / (_PUBLISHED_RUNS + more)
    precise = {name: 1.0 / (own + rest / len(values)) for name, values in logs.items()}
    variance = 1.0 / (1.0 / whole + sum(precise.values())) if whole else 0.0
    bias = variance * sum(precise[name] * means[name] for name in logs)
    kept = own / (own + rest / len(logs[model])) if model in logs else 0.0
    log = bias + kept * (means.get(model, bias) - bias)
    return log, math.sqrt(rest + own * (1.0 - kept) + (1.0 - kept) ** 2 * variance)


class CalibrationResult(Value):
    """A correction, and how good it is.

    Args:
        machine: :func:`~shoal.cost.score.machine_key` of the machine.
        name: of the machine.
        correction: what is applied.
        before: median size of measured / predicted - 1 of its runs.
        after: the same with a correction by all other runs; None where there are none.
    """

    machine: str
    name: str
    correction: Correction
    before: float
    after: float | None = None


class Calibration(Value):
    """The file of corrections.

    Args:
        version: of the file.
        made: the day.
        results: of all machines, engines, quantities and models.
        left_out: runs whose numbers cannot be of the job that was predicted.
    """

    version: int
    made: str
    results: tuple[CalibrationResult, ...] = ()
    left_out: tuple[str, ...] = ()

    def tables(self) -> Iterator[Table | str]:
        """The corrections, for people."""
        rows = []
        for one in self.results:
            own = one.correction
            after = "" if one.after is None else f"{100 * one.after:.1f} %"
            what = (one.name, own.engine, own.quantity, own.model or "all others", own.runs)
            width = f"{100 * (own.width - 1):+.0f} %"
            rows.append((*what, f"{own.factor:.3f}", width, f"{100 * one.before:.1f} %", after))
        columns = ("machine", "engine", "time", "model", "runs", "times", "interval", "error")
        yield table_of("corrections", (*columns, "after"), rows, "    rrrrr")
        yield (
            "error: of its runs in the median, as priced; after: each run by the correction of all "
            "others, where there are others"
        )
        for text in self.left_out:
            yield f"left out, more than 10 times apart: {text}"


@dataclass(frozen=True)
class _Row:
    """One quantity of one run; ``log`` is of measured over uncorrected prediction."""

    machine: Machine
    run: str
    engine: str
    model: str
    quantity: str
    job: object
    log: float
    sd: float


def calibration_path() -> Path:
    """Where corrections are kept."""
    return shoal_home() / "calibration.json"


def calibrate(
    machine: Machine | None = None, *, score: Score | None = None, path: Path | None = None
) -> Calibration:
    """Fit corrections to the runs of the score and store them.

    Args:
        machine: fit those of this machine alone; all that the score knows if not given.
        score: the store of runs; the user's own if not given.
        path: the file; :func:`calibration_path` if not given.

    Returns:
        What was fitted now.

    Raises:
        StoreError: no run has a prediction of a time, or the file is damaged.
    """
    path = path or calibration_path()
    kept = _read(path).results if path.exists() else ()
    rows, left_out = [], []
    for report, counted in (score or Score()).counted_reports():
        if machine is None or machine_key(report.plan.machine) == machine_key(machine):
            for row in _rows(report, counted):
                rows += [row] if isinstance(row, _Row) else []
                left_out += [row] if isinstance(row, str) else []
    if not rows:
        where = "the score" if machine is None else f"the score of {machine.name}"
        wrong = f"; left out: {'; '.join(left_out)}" if left_out else ""
        raise StoreError(
            f"--calibrate: {where} has no run with a predicted time{wrong}; run `shoal train "
            f"--minutes 1` here, or `shoal score --import LOG --plan PLAN` of a run elsewhere"
        )
    results = tuple(_fitted(rows))
    now = {one.machine for one in results}
    others = tuple(one for one in kept if one.machine not in now)
    made = datetime.date.today().isoformat()
    whole = Calibration(version=VERSION, made=made, results=(*others, *results))
    write_json(path, whole.model_dump(mode="json", exclude={"left_out"}), error=StoreError)
    return whole.model_copy(update={"results": results, "left_out": tuple(left_out)})


def calibrated(machine: Machine, *, path: Path | None = None) -> tuple[Machine, str]:
    """A machine with the corrections that are stored for it, and what is wrong with the file.

    Plans for this machine are corrected. A file that is damaged, or of another version, leaves the
    machine as it is, and the second value says so.
    """
    path = path or calibration_path()
    if not path.exists():
        return machine, ""
    try:
        stored = _read(path)
    except StoreError as cause:
        return machine, f"calibration left out: {cause}"
    key = machine_key(machine)
    own = tuple(one.correction for one in stored.results if one.machine == key)
    return (machine.model_copy(update={"calibration": own}) if own else machine), ""


def forget(machine: Machine | None = None, *, path: Path | None = None) -> bool:
    """Remove the corrections of a machine, or of all; whether there were any.

    Raises:
        StoreError: the file is damaged and one machine is named.
    """
    path = path or calibration_path()
    if not path.exists():
        return False
    if machine is None:
        path.unlink()
        return True
    stored = _read(path)
    rest = tuple(one for one in stored.results if one.machine != machine_key(machine))
    kept = stored.model_copy(update={"results": rest})
    write_json(path, kept.model_dump(mode="json", exclude={"left_out"}), error=StoreError)
    return len(rest) < len(stored.results)


def corrected(
    estimate: Estimate, machine: Machine, engine: str, quantity: str, model: str
) -> Estimate:
    """An estimate with the machine's correction of its times."""
    own = machine.correction(engine, quantity, model)
    if own is None:
        return estimate
    factors = {"steps": own.factor, "evaluation": own.factor}
    whole_s = {cause: factors.get(cause, 1.0) * s for cause, s in estimate.whole_s.items()}
    # Saves and failures take as long as before.
    share = sum(whole_s.values()) / sum(estimate.whole_s.values()) / own.factor if whole_s else 1.0
    totals = {name: getattr(estimate, name) for name in ("total_s", "energy_j", "usd")}
    return estimate.model_copy(
        update={
            "step_s": own.of(estimate.step_s),
            "terms_s": {cause: own.factor * s for cause, s in estimate.terms_s.items()},
            "whole_s": whole_s,
            **{name: own.of(t).scaled(share) for name, t in totals.items() if t is not None},
        }
    )


def corrected_latencies(
    predicted: Mapping[str, Interval], machine: Machine, engine: str, model: str
) -> dict[str, Interval]:
    """Predicted quantities with the machine's corrections of TTFT and TPOT, and so of both."""
    own = {name: machine.correction(engine, name, model) for name in ("ttft", "tpot")}
    result = dict(predicted)
    if not any(own.values()):
        return result
    for name, time in predicted.items():
        correction = own.get(name.split("_")[0])
        if correction is not None:
            result[name] = correction.of(time)
    for name, time in predicted.items():
        first = predicted.get(name.replace("e2e_", "ttft_", 1))
        if name.startswith("e2e_") and first is not None and first.value < time.value:
            factors = [one.factor if one else 1.0 for one in own.values()]
            both = factors[0] * first.value + factors[1] * (time.value - first.value)
            result[name] = time.scaled(both / time.value)
    return result


def _read(path: Path) -> Calibration:
    """The stored corrections.

    Raises:
        StoreError: the file is damaged, or of another version; names it.
    """
    mend = "remove it with `shoal score --calibrate --forget`, and calibrate again"
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != VERSION:
            raise StoreError(f"{path}: version {version}, and this release reads {VERSION}; {mend}")
        return parse(Calibration, raw, where=str(path))
    except (OSError, UnicodeDecodeError) as cause:
        raise StoreError(f"{path}: cannot be read ({cause}); {mend}") from cause
    except StoreError:
        raise
    except ShoalError as cause:
        raise StoreError(f"{cause}; {mend}") from cause


def _rows(report: Report[Any], counted: frozenset[str]) -> Iterator[_Row | str]:
    """The times of a report that count; in words what cannot be."""
    plan, job = report.plan, report.plan.job
    machine, engine = plan.machine, getattr(job, "engine", "")
    # What Shoal's own bench predicts rests on a profile of the engine, and not on the price.
    profiled = isinstance(plan, ServePlan) and "log" not in report.versions
    if not engine or profiled:
        return
    known = predictions(plan)
    for quantity, names in _MEASURED.items():
        name = next((one for one in names if one in known and one in counted), None)
        if name is None or not known[name].value > 0:
            continue
        before, measured = known[name], report.measured[name]
        past = machine.correction(engine, quantity, job.model)
        raw = before.value / (past.factor if past else 1.0)
        if not (0 < measured < math.inf and 1 / _APART < measured / raw < _APART):
            yield f"{job.name}: {name} measured {measured:.4g}, predicted {raw:.4g}"
            continue
        width = math.log(before.high / before.low) / 2 / _Z90 if before.low > 0 else 0.0
        sd = width / (past.width if past else 1.0) or _USUAL
        # The same prediction of the same model: the same job once more.
        again = (job.model, round(math.log(raw), 2))
        yield _Row(
            *(machine, job.name, engine, job.model, quantity, again, math.log(measured / raw), sd)
        )


def _fitted(rows: Iterable[_Row]) -> Iterator[CalibrationResult]:
    """A correction for each machine, engine, quantity and model, and for all other models."""
    groups: dict[tuple[str, str, str], list[_Row]] = defaultdict(list)
    for row in rows:
        groups[machine_key(row.machine), row.engine, row.quantity].append(row)
    for (key, engine, quantity), own in groups.items():
        shares, sd = SHARES[quantity], fmean(row.sd for row in own)
        runs: dict[str, int] = defaultdict(int)
        jobs: dict[object, list[_Row]] = defaultdict(list)
        for row in own:
            jobs[row.job].append(row)
            runs[row.model] += 1
        logs: dict[str, list[float]] = defaultdict(list)
        for again in jobs.values():
            logs[again[0].model].append(median(row.log for row in again))
        for model in [*logs, ""] if shares.machine else logs:
            log, width = pooled(logs, model, shares, sd)
            before, after = _errors(logs, model, shares, sd)
            yield CalibrationResult(
                machine=key,
                name=own[-1].machine.name,
                correction=Correction(
                    engine=engine,
                    quantity=quantity,
                    model=model,
                    factor=math.exp(log),
                    width=width,
                    runs=runs[model] if model else len(own),
                ),
                before=before,
                after=after,
            )


def _errors(
    logs: Mapping[str, Sequence[float]], model: str, shares: Shares, sd: float
) -> tuple[float, float | None]:
    """Median error as predicted, and by the correction of all other jobs, or other models."""
    left: list[tuple[float, dict[str, list[float]], str]] = []
    for name, values in logs.items():
        for at, log in enumerate(values):
            rest = {one: list(others) for one, others in logs.items()}
            rest[name] = rest[name][:at] + rest[name][at + 1 :] if model else []
            if model in ("", name):
                left.append((log, {one: others for one, others in rest.items() if others}, name))
    before = median(abs(math.expm1(log)) for log, _, _ in left)
    after = [
        abs(math.expm1(log - pooled(rest, name, shares, sd)[0])) for log, rest, name in left if rest
    ]
    return before, median(after) if after else None
