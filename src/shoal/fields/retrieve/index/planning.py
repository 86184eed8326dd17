"""Plans of an index: every method, tried on some of the vectors."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.kinds import choices
from shoal.fields.rates import timed_call
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.inputs import IndexData, read, shape_of
from shoal.fields.retrieve.index.job import IndexJob, IndexPlan
from shoal.fields.retrieve.index.measuring import front
from shoal.fields.retrieve.index.protocols import VectorIndex
from shoal.ir import Interval, Machine

# Vectors and queries of the trial.
_VECTORS, _QUERIES = 20_000, 100
# The interpreter with numpy, faiss and scikit-learn, as it was measured.
_RUNTIME = 3.2e8


def plan_index(job: IndexJob, machine: Machine) -> list[IndexPlan]:
    """The ways to do it: those that reach the recall first, the fastest of them before the others.

    Raises:
        DataError: the vectors cannot be read.
        VectorIndexError: they cannot be indexed.
    """
    n, dim = shape_of(job)
    data = read(job)
    plans = [
        _plan(job, machine, choice, n, dim, data) for choice in choices(job.method, "vector_index")
    ]
    wanted = job.recall

    def rank(plan: IndexPlan) -> tuple[bool, bool, float]:
        said = plan.predicted
        return not plan.fits, said["recall"].value < wanted, said["query_s"].value

    return sorted(plans, key=rank)


def _plan(
    job: IndexJob, machine: Machine, choice: Choice, n: int, dim: int, data: IndexData
) -> IndexPlan:
    method: VectorIndex = table("vector_index").build(choice, where="method")
    draw = np.random.default_rng(job.seed)
    few = min(n, _VECTORS)
    vectors = np.ascontiguousarray(
        data.vectors[np.sort(draw.choice(len(data.vectors), few, replace=False))]
    )
    queries = data.queries[: min(_QUERIES, len(data.queries))]
    truth = exact_neighbours(vectors, queries, job.k, job.metric)
    build_s, built = timed_call(
        lambda: method.build(vectors, job.metric, seed=job.seed, threads=job.threads)
    )
    point = front(built, method.efforts, queries, truth, job.recall)[-1]
    more = method.growth(few, n)
    size = sum(built.memory().values()) * more.memory
    memory = size + 4.0 * dim * (n + len(data.queries)) + _RUNTIME
    spread = 0.25 if few == n else 0.6
    spelled = table("vector_index").spell(method)
    return IndexPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "query_s": Interval.around(point.query_s * more.query, spread),
            "build_s": Interval.around(build_s * more.build, spread),
            "recall": Interval.around(point.recall, 0.05).capped(1.0),
            "index_bytes": Interval.around(size, 0.1),
            "memory_bytes": Interval.around(memory, 0.3),
        },
        planner="a trial of each index",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=f"{spelled}: {n:,} vectors of {dim} numbers",
        notes=(f"tried with {few:,} vectors and {len(queries)} queries on this machine",),
        n=n,
        dim=dim,
    )
