"""Plans of communities: every expander, by the sizes of the sets and the rates of the machine."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.data.minhash import Bands, bands_reaching
from shoal.fields.graph.communities.adjacency import AdjacencySets
from shoal.fields.graph.communities.costs import rates_of
from shoal.fields.graph.communities.inputs import (
    Query,
    graph_of_job,
    queries_of,
    seeds_of,
    signed_nodes,
)
from shoal.fields.graph.communities.job import CommunitiesJob, CommunitiesPlan
from shoal.fields.graph.communities.protocols import CommunityExpander, CommunityWork
from shoal.fields.graph.communities.signature_graph import MOST_CANDIDATES
from shoal.fields.kinds import choices
from shoal.ir import Interval, Machine

# The interpreter with numpy and SciPy, and bytes for an entry of the graph while it is read.
_RUNTIME, _READING = 1.6e8, 40.0
# Queries by which candidates are predicted.
_SAMPLE = 32


def plan_communities(job: CommunitiesJob, machine: Machine) -> list[CommunitiesPlan]:
    """The ways to do it, the fastest query first; what does not fit comes last.

    Raises:
        ShoalError: the graph cannot be read, or no node has enough neighbours.
    """
    graph = graph_of_job(job)
    nodes, sets = signed_nodes(job, graph)
    cut = bands_reaching(job.threshold, job.recall, job.hashes)
    if job.seeds:
        # A seed that is unknown is said by the run.
        names = (nodes if graph.ids is None else graph.ids[nodes]).astype(str)
        rows = np.flatnonzero(np.isin(names, seeds_of(job.seeds)))
        queries = [Query(rows if len(rows) else np.zeros(1, np.int64), -1)]
    else:
        queries = queries_of(job, graph.labels, nodes)[:_SAMPLE]
    seeds = len(queries[0].seeds)
    work = CommunityWork(
        num_vertices=len(nodes),
        hashes=job.hashes,
        bands=cut.bands,
        seeds=seeds,
        size=job.size,
        candidates=round(predicted_candidates(sets, cut, queries)),
        rates=rates_of(machine),
    )
    entries = int(sets.sizes.sum())
    names = 8.0 if graph.ids is None else float(graph.ids.dtype.itemsize)
    others = graph.num_nodes - len(nodes)
    data = len(nodes) * (4.0 * job.hashes + 8.0 * cut.bands + 8.0) + 8.0 * others
    size = data + names * graph.num_nodes
    plans = [
        _plan(job, machine, one, work, entries, size)
        for one in choices(job.method, "community_expander")
    ]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["query_s"].value))


def predicted_candidates(sets: AdjacencySets, cut: Bands, queries: list[Query]) -> float:
    """How many vertices share a band with a seed, by exact similarities; of 95 % of queries.

    Args:
        sets: of all vertices.
        cut: of the bands.
        queries: some of them.
    """
    counts = []
    for query in queries:
        similar = sets.with_all(query.seeds).astype(np.float64)
        apart = ((1 - np.minimum(similar, 1.0) ** cut.rows) ** cut.bands).prod(axis=0)
        counts.append(min(float((1 - apart).sum()) - len(query.seeds), MOST_CANDIDATES))
    return max(float(np.percentile(counts, 95)), 1.0)


def _plan(
    job: CommunitiesJob,
    machine: Machine,
    choice: Choice,
    work: CommunityWork,
    entries: int,
    size: float,
) -> CommunitiesPlan:
    method: CommunityExpander = table("community_expander").build(choice, where="method")
    cost, rates = method.estimate(work, machine), work.rates
    threads = min(job.threads, machine.device.num_cores or job.threads)
    build_s = (
        rates.hash_s * entries * work.hashes / threads
        + rates.sort_s * work.bands * work.num_vertices
        + rates.byte_s * 4 * work.hashes * work.num_vertices
    )
    memory = cost.memory_total + size + _RUNTIME + _READING * entries
    spelled = table("community_expander").spell(method)
    most = max(cost.terms_s, key=lambda name: cost.terms_s[name])
    return CommunitiesPlan(
        job=job.model_copy(update={"method": spelled}),
        machine=machine,
        predicted={
            "query_s": cost.step_s,
            "build_s": Interval.around(build_s, rates.spread),
            "index_bytes": Interval.around(size, 0.02),
            "memory_bytes": Interval.around(memory, 0.5),
        },
        planner="rates of this processor",
        fits=memory <= machine.device.main_memory.capacity_bytes,
        why=f"{spelled}: {work.num_vertices:,} vertices, {entries:,} members, {work.bands} bands, "
        f"about {work.candidates:,} candidates; most time in {most}",
        num_vertices=work.num_vertices,
        entries=entries,
        candidates=float(work.candidates),
    )
