"""The values of a job ``index``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.retrieve.index.protocols import Metric
from shoal.ir import Job, Plan, Report


class IndexJob(Job):
    """Index vectors, and measure how fast how much of the truth is found.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file of vectors (.npy, .parquet, .csv, .jsonl), one of ann-benchmarks (.hdf5), or
            ``photos:N``, N descriptors of photographs.
        columns: those that make up a vector; empty for every column of numbers.
        metric: what is near: ``l2``, ``ip`` (inner product) or ``cosine``.
        method: the index; None lets the planner choose.
        k: neighbours of a query.
        recall: share of the true neighbours that searches must find.
        queries: vectors that are held out, half to choose the effort of a search, half to measure
            it; a file of ann-benchmarks brings its own.
        threads: for building and searching.
        seed: random seed.
    """

    job: Literal["index"] = "index"
    name: str = Field(default="index", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, ...] = ()
    metric: Metric = "l2"
    method: Annotated[Choice, Kind("vector_index")] | None = None
    k: PositiveInt = 10
    recall: Annotated[float, Gt(0), Le(1)] = 0.95
    queries: Annotated[int, Gt(1)] = 1000
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0


class IndexPlan(Plan[IndexJob]):
    """An index's plan: its job has a method.

    Args:
        n: vectors.
        dim: numbers of each.
    """

    n: int
    dim: int


class IndexReport(Report[IndexPlan]):
    """An index's report; its details have ``front``: recall and queries in a second by effort."""
