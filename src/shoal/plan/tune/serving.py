"""What is tuned of a serving engine: its knobs, and what really serving a workload gives.

An engine is measured, not simulated: the caller passes a :class:`Measure`. A configuration
that runs out of memory or of time is a trial that failed, from which the search learns.

Source: Understanding the Impact of Hyperparameters on LLM Inference Performance: vLLM vs
HuggingFace Pipelines, 2024.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from shoal.core.config import Value, parse
from shoal.core.errors import UnknownKeyError, require, suggestion
from shoal.core.tables import ShownAsTables, Table, table_of
from shoal.ir import Arrival, ServeJob
from shoal.plan.tune.landscape import summary
from shoal.plan.tune.landscape_page import page
from shoal.plan.tune.landscape_page import tables as landscape_tables
from shoal.plan.tune.protocols import (
    Axis,
    Config,
    Progress,
    SearchSpace,
    Setting,
    Trial,
    TrialOutcome,
    Tuner,
    TuningResult,
)
from shoal.plan.tune.repeats import Repeats

Goal = Literal["throughput", "latency", "ttft"]
GOALS: dict[str, str] = {
    "throughput": "output tokens per second, all requests sent at once",
    "latency": "1 / s in which 95 % of the answers end, requests sent at their times",
    "ttft": "1 / s in which 95 % of the first tokens come, requests sent at their times",
}
# Of what a goal is measured in.
UNITS = {"throughput": "tokens/s", "latency": "1/s", "ttft": "1/s"}

# Knob -> (what it is of a job, values that are tried when none are given).
KNOBS: dict[str, tuple[str, tuple[Setting, ...]]] = {
    "max_running": ("most requests of a step", (1, 2, 4, 8, 16, 32, 64)),
    "max_step_tokens": ("most tokens of a step; prompts are cut to fit", (64, 128, 256, 512, 1024)),
    "block_size": ("tokens of a block of the cache", (8, 16, 32, 64)),
    "kv_tokens": ("tokens that the cache holds", ()),
    "chunked": ("prompts may be cut to fit a step", ()),
    "threads": ("threads that compute", ()),
    "precision": ("fp32 or bf16", ()),
    "weights": ("format of the matrices, such as plain or int4-g128", ()),
    "exact": ("the same bits whatever else is in the batch", ()),
}


def knob_of(word: str) -> tuple[str, tuple[Setting, ...]]:
    """A knob and its values, as ``--knob`` has them.

    Raises:
        ConfigError: it is not ``knob=value[,value...]``.
    """
    name, separator, text = word.partition("=")
    values = [value.strip() for value in text.split(",")]
    require(
        bool(separator and name and all(values)),
        "--knob",
        word,
        expected="knob=value[,value...], such as max_running=4,8",
    )
    named: dict[str, Setting] = {"true": True, "false": False}
    return name, tuple(
        int(value) if value.isdigit() else named.get(value.lower(), value) for value in values
    )


def serving_space(given: Mapping[str, Sequence[Setting]] | None = None) -> SearchSpace:
    """The knobs that are tuned.

    Args:
        given: knob -> its values, beside or instead of the usual ones of the first three knobs; a
            knob of one value is fixed.

    Raises:
        UnknownKeyError: a knob that there is not; names the closest.
        ConfigError: a knob without values.
    """
    given = dict(given or {})
    for name in given:
        if name not in KNOBS:
            raise UnknownKeyError(
                f"tune.{name}: no such knob; expected one of {', '.join(KNOBS)}"
                + suggestion(name, KNOBS)
            )
    chosen = {name: tuple(given.get(name, usual)) for name, (_, usual) in KNOBS.items()}
    return SearchSpace(
        axes=tuple(
            Axis(name=name, values=values)
            for name, values in chosen.items()
            if values or name in given
        )
    )


def job_of(job: ServeJob, config: Config) -> ServeJob:
    """The job with the knobs at these values.

    Raises:
        ConfigError: a value that the job cannot have.
    """
    raw = job.model_dump(mode="json", exclude_none=True)
    for name, value in config.items():
        require(name in KNOBS, "tune.config", name, expected=f"one of {', '.join(KNOBS)}")
        if name == "block_size":
            raw["kv"] = {"name": job.kv.name, **job.kv.options, name: value}
        elif name == "chunked":
            raw["scheduler"] = {"name": job.scheduler.name, **job.scheduler.options, name: value}
        else:
            raw[name] = value
    return parse(ServeJob, raw, where="tune")


class ServingSample(Value):
    """What serving a workload once gave.

    Args:
        latency_s: quantile in percent, as text -> s from a request's time to its last token.
        ttft_s: the same to its first token; empty where an engine does not report it.
        memory_bytes: of weights and cache.
        seconds: how long it took.
        failed: why it did not end well; empty if it did.
    """

    throughput: float = 0.0
    latency_s: dict[str, float] = {}
    ttft_s: dict[str, float] = {}
    memory_bytes: float = 0.0
    seconds: float = 0.0
    failed: str = ""

    def value(self, goal: Goal) -> float:
        """What is maximised.

        Raises:
            ConfigError: the engine did not report it.
        """
        if goal == "throughput":
            return self.throughput
        result = self.latency_s if goal == "latency" else self.ttft_s
        require("95" in result, "tune.goal", goal, expected="a goal that this engine measures")
        return 1.0 / max(result["95"], 1e-9)


@runtime_checkable
class Measure(Protocol):
    """Serves a workload with an engine."""

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        """Serve once.

        Memory that does not suffice, a time that is over and a request that can never run are
        samples that say so in ``failed``; anything else is raised.

        Args:
            config: knobs of the engine.
            workload: what arrives.
            seconds: longest that it may take; then it is ended.
        """


class _SpentError(Exception):
    """The time for the search is over."""


@dataclass(eq=False, kw_only=True)
class ServingObjective:
    """The goal that a configuration reaches, measured until its mean is known well enough.

    Args:
        runner: serves.
        workload: what arrives.
        goal: what is maximised.
        repeats: how often each configuration is measured.
        limit_s: longest that one measurement may take.
        until: s on ``clock`` after which nothing is begun; None for no end.
        clock: returns s.
        trials: measurements so far.
    """

    runner: Measure
    workload: Sequence[Arrival]
    goal: Goal = "throughput"
    repeats: Repeats = field(default_factory=Repeats)
    limit_s: float = 60.0
    until: float | None = None
    clock: Callable[[], float] = time.monotonic
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(bool(self.workload), "tune.workload", 0, expected="at least one request")
        require(self.goal in GOALS, "tune.goal", self.goal, expected=f"one of {', '.join(GOALS)}")
        require(self.limit_s > 0, "tune.limit_s", self.limit_s, expected="above 0")

    def __call__(self, config: Config) -> TrialOutcome:
        """Measure with the whole workload."""
        return self.part(config, 1.0)

    def part(self, config: Config, share: float) -> TrialOutcome:
        """Measure with the first requests, this share of all."""
        number = max(1, math.ceil(share * len(self.workload)))
        workload = self.workload[:number]
        if self.goal == "throughput":
            workload = [replace(one, at=0.0) for one in workload]
        failure = ""

        def once() -> float:
            nonlocal failure
            left = math.inf if self.until is None else self.until - self.clock()
            if left <= 0:
                raise _SpentError
            if failure:
                return 0.0
            sample = self.runner.measure(config, workload, min(self.limit_s, left))
            if sample.failed and left < self.limit_s and sample.seconds >= left:
                raise _SpentError  # the search has no time left, which says nothing about it
            failure = sample.failed
            return 0.0 if failure else sample.value(self.goal)

        result = self.repeats.measure(once)
        share = number / len(self.workload)
        outcome = (
            TrialOutcome(failure=failure, share=share)
            if failure
            else TrialOutcome(value=result.mean, samples=result.samples, share=share)
        )
        self.trials.append(Trial(config=dict(config), **outcome.model_dump()))
        return outcome


def tune_serving(
    tuner: Tuner,
    space: SearchSpace,
    objective: ServingObjective,
    trials: int,
    *,
    name: str = "tuner",
    seed: int = 0,
    elsewhere: Sequence[Trial] = (),
    progress: Progress | None = None,
) -> TuningResult:
    """Search until the trials are made or the objective's time is over.

    Args:
        tuner: searches.
        space: the knobs.
        objective: measures.
        trials: how many at most.
        name: of the tuner, for the study.
        seed: of the search.
        elsewhere: trials of another machine, whose best are tried first.
        progress: see :class:`~shoal.plan.tune.protocols.Tuner`.

    Raises:
        PlanError: every trial failed, or time was over before the first; says why.
    """
    try:
        study = tuner.tune(
            space, objective, trials, seed=seed, elsewhere=elsewhere, progress=progress
        )
    except _SpentError:
        # What was measured with more of the workload replaces what was with less.
        made = {space.row(trial.config): trial for trial in objective.trials}
        study = TuningResult(tuner=name, space=space, trials=tuple(made.values()), seed=seed)
    _ = study.best
    return study


@dataclass(frozen=True, kw_only=True)
class EngineTuning(ShownAsTables):
    """An engine's settings as they were measured.

    Args:
        job: model and workload.
        engine: that served it.
        goal: what the best settings are best at.
        result: every trial.
    """

    job: ServeJob
    engine: str
    goal: Goal
    result: TuningResult

    def best_job(self) -> ServeJob:
        """The job with the best settings.

        Raises:
            ConfigError: they are not those of a job: another engine was tuned.
        """
        return job_of(self.job, self.result.best.config)

    def page(self) -> str:
        """All trials as an HTML page."""
        title = f"{self.job.model} with {self.engine}: {self.goal}"
        return page(self.result, title=title, unit=UNITS[self.goal])

    def as_json(self) -> dict[str, Any]:
        """What was found, for other programs."""
        return {"goal": self.goal, "engine": self.engine, **summary(self.result)}

    def tables(self) -> Iterable[Table | str]:
        """Peaks, turns, trials, and the best settings in a sentence."""
        study, unit = self.result, UNITS[self.goal]
        best = study.best
        for one in landscape_tables(study, unit):
            if one.rows:
                yield table_of(one.title, one.columns, one.rows[:8])
        failed = len(study.trials) - len(study.feasible)
        spelt = ", ".join(f"{name}={value}" for name, value in best.config.items())
        yield (
            f"{len(study.trials)} of {study.space.size} configurations tried, {failed} failed; "
            f"the best reaches {best.value:.4g} {unit}: {spelt}"
        )
