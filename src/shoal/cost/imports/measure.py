"""What a foreign log measured: its format found, its steady state, beside a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, require
from shoal.core.tables import ShownAsTables, Table, percent, table_of
from shoal.cost.imports import LOGS
from shoal.cost.imports.log import Log, steady
from shoal.ir import Plan, Report, TrainPlan, errors_of, kind_of, predictions


@dataclass(frozen=True)
class SteadyState:
    """The steady state of a log.

    Args:
        log: the parsed log.
        quantities: quantity -> value, in plain units.
        used: entries of the steady state.
        derived: quantities that were computed from others with the plan's numbers.
    """

    log: Log
    quantities: dict[str, float]
    used: int
    derived: tuple[str, ...] = field(default=())


def read(path: Path, format: str = "auto") -> Log:  # noqa: A002 - the option's name
    """Read a log of an engine.

    Args:
        path: the file; for TensorBoard also a directory.
        format: a part of kind ``log``, or auto.

    Raises:
        DataError: it is in no format that is known, or broken; names the line.
        UnknownPartError: there is no such format.
    """
    require(
        path.exists(),
        "--import",
        str(path),
        expected="a log, an event file, or an export",
        hint="give a path that exists",
        error=DataError,
    )
    if format != "auto":
        log: Log = LOGS.build(format, where="--format").read(path)
        return log
    known = {name: LOGS.build(name).sniff(path) for name in LOGS}
    best = max(known, key=lambda name: known[name])
    if known[best] == 0:
        if path.is_dir():
            raise DataError(f"{path}: a directory without event files of TensorBoard; give a file")
        place, text = _first_line(path)
        raise DataError(
            f"{path}, line {place}: {text[:80]!r}: in no known format ({', '.join(LOGS)}); give a "
            "log of one of these engines, or name the format with --format"
        )
    chosen: Log = LOGS.build(best).read(path)
    return chosen


def _first_line(path: Path) -> tuple[int, str]:
    from shoal.cost.imports.log import lines

    return next(((place, text.strip()) for place, text in lines(path) if text.strip()), (1, ""))


def measure(log: Log, plan: Plan[Any] | None = None) -> SteadyState:
    """The log's steady state; with a plan, also what follows from its batch and its ranks.

    Raises:
        DataError: the log is of another job than the plan; names the line where it says so.
    """
    result, used = steady(log)
    if plan is None:
        return SteadyState(log, result, used)
    _same_job(log, plan)
    before = set(result)
    if isinstance(plan, TrainPlan):
        job = plan.job
        world, tokens = job.parallel.world, float(job.global_batch * job.seq_len)
        if "step_s" not in result:
            if result.get("tokens_per_s"):
                result["step_s"] = tokens / result["tokens_per_s"]
            elif result.get("device_tokens_per_s"):
                result["step_s"] = tokens / (result["device_tokens_per_s"] * world)
            elif result.get("samples_per_s"):
                result["step_s"] = job.global_batch / result["samples_per_s"]
        if result.get("step_s") and "tokens_per_s" not in result:
            result["tokens_per_s"] = tokens / result["step_s"]
    return SteadyState(log, result, used, tuple(sorted(set(result) - before)))


def _same_job(log: Log, plan: Plan[Any]) -> None:
    require(
        log.job == plan.job.job,
        "--plan",
        f"a plan of {plan.job.job}",
        expected=f"a plan of {log.job}, as the log {log.path} of {log.format}",
        error=DataError,
    )
    for name, (said, place) in log.facts.items():
        planned = getattr(plan.job, name)
        if said != planned:
            raise DataError(
                f"{log.path}, line {place}: {name} = {said:g}, and the plan has {planned}: the "
                f"log is from another run; give the plan of that run"
            )


def report(measured: SteadyState, plan: Plan[Any]) -> Report[Any]:
    """Prediction beside measurement, for the score.

    Raises:
        DataError: the log measured nothing that a plan predicts.
    """
    kept = {name: value for name, value in measured.quantities.items() if math.isfinite(value)}
    result = predictions(plan)
    errors = errors_of(plan, kept)
    require(
        bool(errors),
        "--import",
        str(measured.log.path),
        expected=f"one of {', '.join(result) or 'the quantities of an estimated plan'}",
        hint=f"it has {', '.join(sorted(kept)) or 'nothing'}; plan again if the plan was written "
        "by hand",
        error=DataError,
    )
    versions = {"log": measured.log.format}
    report_type = kind_of(plan).report_type
    return report_type(plan=plan, measured=kept, errors=errors, versions=versions)


@dataclass(frozen=True)
class ImportedLog(ShownAsTables):
    """A log that was read, and its report where its plan is known.

    Args:
        measured: of the log.
        scored: what its plan predicted beside it; None without a plan.
    """

    measured: SteadyState
    scored: Report[Any] | None

    def figures(self) -> dict[str, Any]:
        """For programs."""
        return {
            "format": self.measured.log.format,
            "entries": len(self.measured.log.entries),
            "steady_entries": self.measured.used,
            "measured": self.measured.quantities,
            "errors": {} if self.scored is None else self.scored.errors,
        }

    def tables(self) -> Iterator[Table | str]:
        """What the log measured, beside what its plan predicted."""
        log, measured = self.measured.log, self.measured
        fields = {} if self.scored is None else predictions(self.scored.plan)
        errors = {} if self.scored is None else self.scored.errors
        yield table_of(
            f"{log.path.name}, a log of {log.format}",
            ("quantity", "predicted", "measured", "error"),
            [
                (
                    name + (" (from the plan's batch)" if name in measured.derived else ""),
                    f"{fields[name].value:.4g}" if name in fields else "",
                    f"{value:.4g}",
                    percent(errors.get(name), sign=True),
                )
                for name, value in sorted(measured.quantities.items())
            ],
            " rrr",
        )
        if log.entries:
            yield (
                f"median of the last {measured.used} of {len(log.entries)} entries; the others are "
                "warm-up, or idle"
            )
        if self.scored is None:
            yield "not scored: give the plan that was run with --plan"
