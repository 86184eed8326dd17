"""Shoal's engine, measured under knobs: a workload is served for real, and what it gave is told."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core.errors import ConfigError, ServeError
from shoal.cost.serve_sim import Served
from shoal.ir import Arrival, Output, ServeJob
from shoal.plan.tune.protocols import Config
from shoal.plan.tune.serving import Sample, job_of
from shoal.serve.bench import replay, weights_of
from shoal.serve.build import engine_of

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer

__all__ = ["ShoalRunner", "failure", "quantiles", "sample_of"]

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

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> Sample:
        """See :class:`~shoal.plan.tune.serving.Measure`."""
        job = job_of(self.job, config)
        began = time.perf_counter()

        def late(_: Output, now: float) -> None:
            if now > seconds:
                raise _LateError

        try:
            model = self._model(job)
            torch.set_num_threads(job.threads or torch.get_num_threads())
            engine, _, runner = engine_of(job, model)
            # What is made at the first step of an engine is not of this workload.
            replay(engine, [Arrival(0.0, (0,) * len(workload[0].prompt), 1)])
            began = time.perf_counter()
            served = replay(engine, workload, watch=late)
        except _LateError:
            return Sample(
                seconds=time.perf_counter() - began,
                failed=f"out of time: not served within {seconds:.3g} s",
            )
        except (MemoryError, RuntimeError, ServeError, ConfigError) as cause:
            return Sample(seconds=time.perf_counter() - began, failed=failure(cause))
        weights = sum(p.nbytes for p in model.parameters())
        cache = runner.cache.nbytes
        return sample_of(served, memory_bytes=float(weights + cache))

    def _model(self, job: ServeJob) -> Transformer:
        key = tuple(getattr(job, name) for name in _OF_MODEL)
        if key not in self._models:
            if self.model is not None and key == tuple(getattr(self.job, n) for n in _OF_MODEL):
                self._models[key] = self.model
            else:
                self._models[key], _ = weights_of(job)
        return self._models[key]


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


def sample_of(served: Sequence[Served], *, memory_bytes: float) -> Sample:
    """What was served, in numbers."""
    ended = [one for one in served if not math.isnan(one.finish)]
    total = max(one.finish for one in ended) - min(one.arrival for one in ended)
    return Sample(
        throughput=sum(one.n_output for one in ended) / max(total, 1e-12),
        latency_s=quantiles([one.finish - one.arrival for one in ended]),
        ttft_s=quantiles([one.ttft for one in ended if not math.isnan(one.first)]),
        memory_bytes=memory_bytes,
        seconds=total,
    )
