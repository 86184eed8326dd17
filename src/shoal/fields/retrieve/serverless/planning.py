"""Plans of a search by functions: every back-end, with a trial of the index here."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.kinds import choices
from shoal.fields.rates import least_seconds
from shoal.fields.retrieve.index.exact import recall
from shoal.fields.retrieve.serverless.job import SearchFunctionsJob, SearchFunctionsPlan
from shoal.fields.retrieve.serverless.protocols import FunctionBackend, TreeShape, parse_tree
from shoal.fields.retrieve.serverless.workload import built, filtered_data, shape
from shoal.ir import Interval, Machine

# Vectors of the trial, and the interpreter with numpy.
_VECTORS, _RUNTIME = 20_000, 3e8
# Shares of a batch's time that an allocator waits for those below, and that a processor waits for a
# core, as they were measured.
_ALLOCATOR, _PROCESSOR = 0.5, 0.1
# Of the calls of the first batch, those that start a container.
_COLD = 0.7


def plan_functions(job: SearchFunctionsJob, machine: Machine) -> list[SearchFunctionsPlan]:
    """The ways to do it, those that fit and are fast first.

    Raises:
        ConfigError: the tree is too large.
        DataError: the vectors cannot be read.
        VectorIndexError: they cannot be indexed.
    """
    n, dim = shape(job)
    tree = parse_tree(job.tree)
    data = filtered_data(job, _VECTORS)
    index = built(job, data)
    search_s, hits = least_seconds(lambda: index.search(data.queries, job.k, where=data.where))
    search_s *= n / len(data.vectors)
    share = recall(hits, data.truth(job.k, job))
    nodes, calls = expected_calls(tree, job.queries, job.parts, float(hits.stats["parts"].mean()))
    size = sum(index.memory().values()) * n / len(data.vectors)
    plans = [
        _plan(job, machine, choice, (n, dim, nodes, calls, search_s, share, size), tree)
        for choice in choices(job.backend, "function_backend")
    ]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["batch_s"].value))


def expected_calls(tree: TreeShape, queries: int, parts: int, visited: float) -> tuple[int, float]:
    """Allocators that have something to do, and all calls of a batch.

    Args:
        tree: of allocators.
        queries: that they share.
        parts: of the vectors.
        visited: parts of a query, on average.
    """
    ends = np.arange(tree.nodes + 1) * queries // tree.nodes
    own = np.diff(ends)
    nodes, todo = 0, [(node, 1) for node in tree.children(-1, 0)]
    while todo:
        node, level = todo.pop()
        if ends[node + tree.subtree(level)] > ends[node]:
            nodes += 1
            todo += [(child, level + 1) for child in tree.children(node, level)]
    # Parts that none of a node's queries visits have no call.
    visits = parts * (1 - (1 - min(visited / parts, 1.0)) ** own)
    return nodes, nodes + float(visits.sum())


def _plan(
    job: SearchFunctionsJob,
    machine: Machine,
    choice: Choice,
    known: tuple[int, int, int, float, float, float, float],
    tree: TreeShape,
) -> SearchFunctionsPlan:
    n, dim, nodes, calls, search_s, share, size = known
    backend: FunctionBackend = table("function_backend").build(choice, where="backend")
    cores = machine.device.num_cores or 1
    # Dispatches of a node follow each other, and levels too; the work shares the cores.
    waits = (tree.depth * tree.fanout + min(job.parts, calls)) * job.latency_s
    work = calls * backend.call_s / backend.cores(cores) + search_s / cores
    batch_s = waits + work + tree.depth * backend.call_s
    containers = nodes + min(_COLD * (calls - nodes), job.parts * job.copies)
    cold_s = batch_s + containers * backend.cold_s / cores
    gb_s = batch_s * (nodes * _ALLOCATOR + (calls - nodes) * _PROCESSOR) * job.memory_gb
    usd = job.prices.usd(calls, gb_s) / job.queries * 1000
    memory = containers * backend.memory_bytes + size + _RUNTIME
    spelled = table("function_backend").spell(backend)
    return SearchFunctionsPlan(
        job=job.model_copy(update={"backend": spelled}),
        machine=machine,
        predicted={
            "batch_s": Interval.around(batch_s, 0.8),
            "cold_s": Interval.around(cold_s, 0.8),
            "usd_per_1000": Interval.around(usd, 0.8),
            "calls": Interval.around(calls, 0.3),
            "recall": Interval.around(share, 0.1),
            "index_bytes": Interval.around(size, 0.2),
            "memory_bytes": Interval.around(size + _RUNTIME, 0.5),
        },
        planner="a trial of the index, and seconds of calls",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=f"{spelled}: {nodes} allocators, {calls:.0f} calls of a batch of {job.queries} queries",
        notes=(
            f"tried with {min(n, _VECTORS):,} vectors on this machine",
            f"{job.call_usd:g} USD a call, {job.gb_s_usd:g} USD a GB-second",
        ),
        n=n,
        dim=dim,
        calls=calls,
    )
