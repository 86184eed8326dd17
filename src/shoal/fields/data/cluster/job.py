"""The values of a clustering job: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class ClusterJob(Job):
    """Group objects, around medoids or centres.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file of vectors (.npy, .parquet, .csv, .jsonl), or of dissimilarities with
            ``metric: precomputed``; or ``photos:N``, N descriptors of photographs.
        columns: those that make up a vector; empty for every column of numbers.
        k: clusters; ``auto`` for a method that finds how many, to which a number is the most.
        metric: the distance: ``euclidean``, ``cosine``, any name of scikit-learn's, or
            ``precomputed``.
        symmetric: refuse precomputed dissimilarities that are not; if false, row o and column c say
            how far object o is from medoid c.
        method: how clusters are found; None lets the planner choose.
        init: the start: ``random``, ``build`` or ``lab``.
        max_iter: most passes over the candidates, or swaps of a method that makes one a pass.
        max_excess: loss above that of FasterPAM, as a share, that may be paid for time.
        threads: threads that compare candidates with the medoids.
        seed: random seed.
    """

    job: Literal["cluster"] = "cluster"
    name: str = Field(default="cluster", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, ...] = ()
    k: PositiveInt | Literal["auto"] = 8
    metric: str = "euclidean"
    symmetric: bool = True
    method: Annotated[Choice, Kind("clusterer")] | None = None
    init: Literal["random", "build", "lab"] = "random"
    max_iter: PositiveInt = 10_000
    max_excess: NonNegativeFloat = 0.02
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0


class ClusterPlan(Plan[ClusterJob]):
    """A clustering's plan: its job has a method.

    Args:
        n: objects.
        dim: numbers of a vector; 0 where dissimilarities are given.
    """

    n: int
    dim: int


class ClusterReport(Report[ClusterPlan]):
    """A clustering's report; its details have ``sizes`` and ``names``."""
