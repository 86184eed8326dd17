"""Vectors, attributes, queries and a filter of a job ``search_functions``."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np

from shoal.core.random import generator
from shoal.fields.retrieve.collections.filters import PointFilter, col
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.inputs import read, shape_of
from shoal.fields.retrieve.index.job import IndexJob
from shoal.fields.retrieve.index.osq.index import OSQIndex
from shoal.fields.retrieve.index.protocols import Hits
from shoal.fields.retrieve.serverless.job import SearchFunctionsJob


class FilteredData(NamedTuple):
    """What is searched, and for what.

    Args:
        vectors: float32 [N, d].
        queries: float32 [Q, d].
        attributes: name -> float64 [N], uniform from 0 to 1.
        where: a filter on all of them; None if there are none.
        passed: bool [N].
    """

    vectors: np.ndarray
    queries: np.ndarray
    attributes: dict[str, np.ndarray]
    where: PointFilter | None
    passed: np.ndarray

    def truth(self, k: int, job: SearchFunctionsJob) -> Hits:
        """The true neighbours among the rows that pass."""
        rows = np.flatnonzero(self.passed)
        near = exact_neighbours(self.vectors[rows], self.queries, k, job.metric)
        ids = np.where(near.ids >= 0, rows[near.ids] if len(rows) else -1, -1)
        return Hits(ids, near.distances, {})


def uniform_attributes(
    rows: int, count: int, selectivity: float, draw: np.random.Generator
) -> tuple[dict[str, np.ndarray], PointFilter | None, np.ndarray]:
    """Uniform attributes ``a0`` ..., a range of each, and which rows are in all of them.

    Args:
        rows: how many.
        count: attributes.
        selectivity: share of the rows that pass on average: each range has its root.
        draw: of values and of ranges.
    """
    values = {f"a{at}": draw.random(rows) for at in range(count)}
    width = selectivity ** (1 / max(count, 1))
    passed, parts = np.ones(rows, bool), []
    for name, column in values.items():
        low = draw.random() * (1 - width)
        passed &= (column >= low) & (column <= low + width)
        parts.append(col(name).between(low, low + width))
    return values, reduce(and_, parts) if parts else None, passed


def _index_job(job: SearchFunctionsJob) -> IndexJob:
    return IndexJob(
        data=job.data, columns=job.columns, metric=job.metric, k=job.k, queries=job.queries,
        seed=job.seed,
    )  # fmt: skip


def shape(job: SearchFunctionsJob) -> tuple[int, int]:
    """Vectors that are indexed, and the numbers of each.

    Raises:
        DataError: the file cannot be read.
        VectorIndexError: there are too few.
    """
    return shape_of(_index_job(job))


def filtered_data(job: SearchFunctionsJob, most: int | None = None) -> FilteredData:
    """Read vectors and queries, and draw attributes.

    Args:
        job: what to do.
        most: vectors; None for all.

    Raises:
        DataError: the file cannot be read.
        VectorIndexError: vectors that cannot be indexed.
    """
    data = read(_index_job(job))
    draw = generator(job.seed, purpose="attributes")
    vectors = data.vectors
    if most is not None and most < len(vectors):
        chosen = np.sort(draw.choice(len(vectors), most, replace=False))
        vectors = np.ascontiguousarray(vectors[chosen])
    made = uniform_attributes(len(vectors), job.attributes, job.selectivity, draw)
    return FilteredData(vectors, data.queries, *made)


def built(job: SearchFunctionsJob, data: FilteredData) -> OSQIndex:
    """The index of them.

    Raises:
        VectorIndexError: vectors that cannot be indexed.
    """
    index = OSQIndex(job.bits_per_dim, job.parts, metric=job.metric, seed=job.seed)
    index.build(data.vectors, attributes=data.attributes, threads=job.threads)
    return index
