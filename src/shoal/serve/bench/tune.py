"""Engines measured under knobs: a workload is served for real.

:class:`ShoalRunner` serves in its own process, and looks at the time when an output arrives. An
engine that blocks gives no output, so :class:`MeasureProcess` keeps the time in another process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.errors import ConfigError, RankError, ServeError
from shoal.core.pool.local import LocalActor
from shoal.core.traits import traits
from shoal.cost.serving.simulator import ServedRequest
from shoal.ir import Arrival, ModelShape, Output, ServeJob
from shoal.plan.serving.inputs import arrivals_of
from shoal.plan.tune.protocols import Config, SearchSpace, Setting
from shoal.plan.tune.serving import Measure, ServingSample, job_of, serving_space
from shoal.serve.bench.replay import replay, weights_of
from shoal.serve.engine.build import engine_of

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.serve.engine.loop import Engine

# Knobs that change the model itself, not only the engine around it.
_OF_MODEL = ("precision", "weights", "exact")


class _LateError(Exception):
    """A measurement took too long."""


@dataclass(eq=False, kw_only=True)
class ShoalRunner:
    """Serves in this process, with a new engine for every configuration.

    Args:
        job: what the knobs do not say.
        model: with its weights; those of the job if not given.
    """

    job: ServeJob
    model: Transformer | None = None
    _models: dict[tuple[object, ...], Transformer] = field(default_factory=dict, repr=False)
    _ready: tuple[Config, Engine, int] | None = field(default=None, repr=False)

    def prepare(self, config: Config, workload: Sequence[Arrival]) -> ServingSample | None:
        """Make the engine that is measured next; a sample where that fails."""
        job = job_of(self.job, config)
        began = time.perf_counter()
        try:
            model = self._model(job)
            torch.set_num_threads(job.threads or torch.get_num_threads())
            engine, _, runner = engine_of(job, model)
            # What is made at the first step of an engine is not of this workload.
            replay(engine, [Arrival(0.0, (0,) * len(workload[0].prompt), 1)])
        except (MemoryError, RuntimeError, ServeError, ConfigError) as cause:
            return ServingSample(seconds=time.perf_counter() - began, failed=failure(cause))
        weights = sum(p.nbytes for p in model.parameters())
        self._ready = config, engine, weights + runner.cache.nbytes
        return None

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        if self._ready is None or self._ready[0] != config:
            failed = self.prepare(config, workload)
            if failed is not None:
                return failed
        assert self._ready is not None
        _, engine, memory_bytes = self._ready
        self._ready = None
        began = time.perf_counter()

        def late(_: Output, now: float) -> None:
            if now > seconds:
                raise _LateError

        try:
            served = replay(engine, workload, watch=late)
        except _LateError:
            return ServingSample(
                seconds=time.perf_counter() - began,
                failed=f"out of time: not served within {seconds:.3g} s",
            )
        except (MemoryError, RuntimeError, ServeError, ConfigError) as cause:
            return ServingSample(seconds=time.perf_counter() - began, failed=failure(cause))
        return sample_of(served, memory_bytes=float(memory_bytes))

    def _model(self, job: ServeJob) -> Transformer:
        key = tuple(getattr(job, name) for name in _OF_MODEL)
        if key not in self._models:
            if self.model is not None and key == tuple(getattr(self.job, n) for n in _OF_MODEL):
                self._models[key] = self.model
            else:
                self._models[key], _ = weights_of(job)
        return self._models[key]


@dataclass(eq=False, kw_only=True)
class MeasureProcess:
    """Measures in a separate process, which is killed if a measurement blocks.

    Args:
        make: makes the :class:`~shoal.plan.tune.serving.Measure` in that process; importable by
            name. Where it has a method ``prepare(config, workload)``, that is called first.
        arguments: of ``make``, by name.
        ready_s: s that the process may take to start, and then to prepare each measurement.
        grace_s: s beyond its limit after which a measurement counts as blocked.
    """

    make: Callable[..., Measure]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ready_s: float = 600.0
    grace_s: float = 5.0
    _actor: LocalActor | None = field(default=None, repr=False)

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        began = time.perf_counter()
        for method, limit_s, given in (
            ("prepare", self.ready_s, (config, workload)),
            ("measure", seconds + self.grace_s, (config, workload, seconds)),
        ):
            try:
                sample = self._started().call(method, *given).result(limit_s)
            except TimeoutError:
                why = f"out of time: the engine did not respond within {limit_s:.3g} s ({method})"
            except RankError as cause:  # it was killed, for want of memory for instance
                why = str(cause)
            else:
                if sample is None:
                    continue
                assert isinstance(sample, ServingSample)
                return sample
            self.close()
            return ServingSample(seconds=time.perf_counter() - began, failed=why)
        raise AssertionError("measure() gives a sample")

    def close(self) -> None:
        """End the process; the next measurement starts another."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None

    def _started(self) -> LocalActor:
        if self._actor is None:
            self._actor = LocalActor("engine to be measured")
            given = (self.make, dict(self.arguments))
            self._actor.construct(_Measured, given, {}, limit_s=self.ready_s)
        return self._actor


class _Measured:
    """What a :class:`MeasureProcess` has in its process."""

    def __init__(self, make: Callable[..., Measure], arguments: Mapping[str, Any]) -> None:
        self._make, self._arguments = make, arguments
        self._measure: Measure | None = None

    def prepare(self, config: Config, workload: Sequence[Arrival]) -> ServingSample | None:
        if self._measure is None:
            self._measure = self._make(**self._arguments)
        prepare = getattr(self._measure, "prepare", None)
        return None if prepare is None else prepare(config, workload)

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        assert self._measure is not None
        return self._measure.measure(config, workload, seconds)


def failure(cause: BaseException) -> str:
    """Why a measurement failed, if it is for want of memory or for what was asked.

    Raises:
        BaseException: ``cause`` itself, if it is a fault of the program.
    """
    said = " ".join(str(cause).split())
    if isinstance(cause, MemoryError) or (
        isinstance(cause, RuntimeError) and ("alloc" in said or "out of memory" in said)
    ):
        return f"out of memory: {said[:200]}"
    if isinstance(cause, ServeError | ConfigError):
        return said
    raise cause


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Medians and tails, by percent as text; nothing of nothing."""
    return {str(q): float(np.percentile(values, q)) for q in (50, 95, 99) if values}


def sample_of(served: Sequence[ServedRequest], *, memory_bytes: float) -> ServingSample:
    """What was served, in numbers."""
    ended = [one for one in served if not math.isnan(one.finish)]
    total = max(one.finish for one in ended) - min(one.arrival for one in ended)
    return ServingSample(
        throughput=sum(one.n_output for one in ended) / max(total, 1e-12),
        latency_s=quantiles([one.finish - one.arrival for one in ended]),
        ttft_s=quantiles([one.ttft for one in ended if not math.isnan(one.first)]),
        memory_bytes=memory_bytes,
        seconds=total,
    )


# Requests of a workload that is made up.
_REQUESTS = 32

Start = Callable[[int | None], tuple[MeasureProcess, Sequence[Arrival]]]
"""Loads an engine and requests of its workload."""


def workload_of(job: ServeJob, shape: ModelShape, requests: int | None) -> list[Arrival]:
    """The requests to serve; a trace has its own number of them."""
    few = None if "recorded" in traits("workload", job.workload) else _REQUESTS
    return arrivals_of(job, shape, count=requests or few)


def shoal_engine(
    job: ServeJob, given: Mapping[str, Sequence[Setting]]
) -> tuple[SearchSpace, Start]:
    """The knobs of this engine, and what loads it and its workload.

    Args:
        job: model and workload, and what the knobs do not say.
        given: values of knobs.

    Raises:
        ConfigError: a knob that there is not.
    """

    def start(requests: int | None) -> tuple[MeasureProcess, Sequence[Arrival]]:
        model, _ = weights_of(job)
        workload = workload_of(job, model.config.shape(), requests)
        return MeasureProcess(make=ShoalRunner, arguments={"job": job}), workload

    return serving_space(given), start
