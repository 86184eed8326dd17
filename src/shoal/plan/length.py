"""How long a job is: steps from steps, tokens or minutes."""

from __future__ import annotations

import math

from shoal.core.errors import require
from shoal.cost.training.totals import steps_of
from shoal.ir import Estimate, TrainJob

DEFAULT_STEPS = 1000
"""Steps of a job that names no length."""


def num_steps(job: TrainJob, estimate: Estimate | None = None) -> int:
    """Optimizer steps of ``job``: its own, or from its tokens, or from its minutes.

    Raises:
        ConfigError: the job gives minutes and there is no estimate to divide them by.
    """
    steps = steps_of(job)
    if steps is not None:
        return steps
    if job.minutes is None:
        return DEFAULT_STEPS
    require(
        estimate is not None and estimate.step_s.value > 0,
        "minutes",
        job.minutes,
        expected="steps or tokens where there is no estimate",
        hint="plan the job first, or give steps",
    )
    assert estimate is not None
    per_step = estimate.step_s.value
    if job.evaluation.every:
        # An evaluation is a forward pass, about a third of a step, over its own tokens.
        share = job.evaluation.tokens / (job.global_batch * job.seq_len) / 3
        per_step *= 1 + share / job.evaluation.every
    return max(1, math.floor(60.0 * job.minutes / per_step))


def with_steps(job: TrainJob, estimate: Estimate | None = None) -> TrainJob:
    """``job`` with its length in steps and in nothing else."""
    steps = num_steps(job, estimate)
    return job.model_copy(update={"steps": steps, "tokens": None, "minutes": None})
