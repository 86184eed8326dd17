"""The values of a sparse coding: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.ir import Job, Plan, Report


class SparseCodeJob(Job):
    """Learn components of which few explain each vector.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file of vectors (.npy, .parquet, .csv, .jsonl); ``patches:N``, patches of 12 x 12
            of photographs; ``bars:N`` or ``bars:N:MODEL``, bars of 8 x 8 put together by a model.
        columns: those that make up a vector; empty for every column of numbers.
        components: causes that are learned.
        candidates: causes of a vector whose combinations are looked at.
        active: most causes of a vector at a time.
        iterations: of expectation and maximization.
        schedule: of the annealing; None for the usual one.
        restarts: starts of which the best is taken; with more than one, each is learned on a sample
            of 1,000 vectors, and all vectors are learned where nothing is annealed any more.
        method: the model; None lets the planner choose.
        pool: where the vectors are: None for this process, ``local``, ``ray``.
        workers: processes that share the vectors, in a pool.
        seed: random seed.
    """

    job: Literal["sparse_code"] = "sparse_code"
    name: str = Field(default="sparse-code", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, ...] = ()
    components: PositiveInt = 16
    candidates: PositiveInt = 8
    active: PositiveInt = 4
    iterations: PositiveInt = 100
    schedule: AnnealSchedule | None = None
    restarts: PositiveInt = 1
    method: Annotated[Choice, Kind("superposition")] | None = None
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1
    seed: NonNegativeInt = 0


class SparseCodePlan(Plan[SparseCodeJob]):
    """A sparse coding's plan: its job has a model.

    Args:
        points: vectors.
        dim: numbers of a vector.
    """

    points: int
    dim: int


class SparseCodeReport(Report[SparseCodePlan]):
    """A sparse coding's report; its details have ``active``: causes active in the mean."""
