"""The values of a coded training job: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class CodedJob(Job):
    """Train models in turn by full-batch gradients from workers, some of which are slow at times.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: what is learned from.
        learner: the model.
        scheme: how gradients are divided over workers; None lets the planner pick one.
        workers: processes that compute gradients.
        models: that are trained in turn, from different seeds.
        gradients: steps of all models together.
        examples: of the data that are used; 0 for all.
        lr: step of gradient descent.
        mu: a round is ended at 1 + mu times the time of the fastest worker, if the gradients can
            still be decoded.
        log: file of workers' times (Parquet or JSON) from which the planner picks; None for the
            slow-downs described below.
        most: stragglers beyond which the planner tries no scheme.
        data_s: seconds that a worker sleeps for the whole data, beside computing; emulates larger
            models.
        slow_chance: chance that a worker becomes slow, in each round.
        slow_recovery: chance that a slow one recovers.
        slow_factor: times as long that a slow worker sleeps.
        seed: random seed.
    """

    job: Literal["coded_training"] = "coded_training"
    name: str = Field(default="coded_training", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: Annotated[Choice, Kind("example_source")] = Choice(name="digits")
    learner: Annotated[Choice, Kind("learner")] = Choice(name="cnn_digits")
    scheme: Annotated[Choice, Kind("coded_scheme")] | None = None
    workers: PositiveInt = 4
    models: PositiveInt = 4
    gradients: PositiveInt = 40
    examples: NonNegativeInt = 0
    lr: PositiveFloat = 0.1
    mu: NonNegativeFloat = 1.0
    log: str | None = None
    most: PositiveInt = 6
    data_s: NonNegativeFloat = 0.0
    slow_chance: Annotated[float, Field(ge=0, lt=1)] = 0.05
    slow_recovery: Annotated[float, Field(gt=0, le=1)] = 0.7
    slow_factor: Annotated[float, Field(ge=1)] = 5.0
    seed: NonNegativeInt = 0


class CodedPlan(Plan[CodedJob]):
    """The plan: its job has a scheme.

    Args:
        worker_load: fraction of the data that a worker processes in a round.
        delay: rounds that a gradient may be late.
    """

    worker_load: float
    delay: int


class CodedReport(Report[CodedPlan]):
    """The report; its details have the models' losses and accuracies."""
