"""Communities from a plan to a report: sign, ask, judge, draw."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.graph.communities.inputs import (
    Query,
    graph_of_job,
    queries_of,
    seeds_of,
    signed_nodes,
)
from shoal.fields.graph.communities.job import CommunitiesJob
from shoal.fields.graph.communities.picture import network
from shoal.fields.graph.communities.protocols import CommunityExpander
from shoal.fields.graph.communities.signature_graph import SignatureGraph
from shoal.fields.graph.graph import CSRGraph
from shoal.fields.rates import timed_call
from shoal.fields.running import RunOutcome, RunProgress

SIGNATURES = "signatures"
"""The directory that :meth:`SignatureGraph.open` reads."""


def execute(job: CommunitiesJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Sign all vertices, answer the queries, and some of them with exact similarities.

    Raises:
        ShoalError: the graph cannot be read or signed; a seed is unknown.
    """
    progress.say(0.0, "reading")
    read_s, graph = timed_call(lambda: graph_of_job(job))
    method: CommunityExpander = table("community_expander").build(choice, where="method")
    progress.say(0.1, f"signing {graph.num_nodes:,} vertices")
    build_s, signed = timed_call(
        lambda: SignatureGraph.from_edges(
            graph, side=job.side, hashes=job.hashes, least_degree=job.least_degree,
            threshold=job.threshold, recall=job.recall, seed=job.seed, threads=job.threads,
        )
    )  # fmt: skip
    nodes, sets = signed_nodes(job, graph)
    if job.seeds:
        queries = [Query(signed.rows_of(seeds_of(job.seeds)), -1)]
    else:
        queries = queries_of(job, graph.labels, nodes)
    progress.say(0.5, "asking")
    answers, seconds = [], []
    for query in queries:
        begin = time.perf_counter()
        answers.append(signed.expand(signed.ids[query.seeds], _size(job, query), method))
        seconds.append(time.perf_counter() - begin)
    progress.say(0.7, "asking for exact answers")
    measured: dict[str, float] = {
        "query_s": float(np.percentile(seconds, 95)),
        "median_s": float(np.median(seconds)),
        "build_s": build_s,
        "read_s": read_s,
        "index_bytes": float(sum(signed.memory().values())),
    }
    overlap = []
    for query, answer in list(zip(queries, answers, strict=True))[: job.judged]:
        count = _size(job, query) - len(query.seeds)
        exact = signed.ids[method.expand(sets, query.seeds, count).rows]
        overlap.append(float(np.isin(exact, answer.added).mean()) if len(exact) else 1.0)
    if overlap:
        measured["overlap"] = float(np.mean(overlap))
    shares = [
        _share(graph, nodes, query, signed.ids, answer.added)
        for query, answer in zip(queries, answers, strict=True)
        if query.label >= 0 and len(answer.added)
    ]
    if shares:
        measured["label_share"] = float(np.mean(shares))
    first = answers[0]
    view = signed.view(first.members)
    details: dict[str, Any] = {
        "method": choice.model_dump(mode="json"),
        "data": job.data,
        "vertices": signed.num_vertices,
        "unsigned": len(signed.others),
        "cut": list(signed.cut),
        "bytes": signed.memory(),
        "queries": len(queries),
        "candidates": float(np.mean([answer.candidates for answer in answers])),
        "seeds": first.seeds.tolist(),
        "added": first.added.tolist(),
        "scores": first.scores.tolist(),
        "groups": view.groups.tolist(),
    }
    progress.say(0.9, "writing")
    signed.save(progress.directory / SIGNATURES)
    write_json(progress.directory / "community.json", details)
    write_atomic(progress.directory / "community.svg", network(view, len(first.seeds), job.seed))
    if job.serve_port is not None:
        _serve(signed, job.serve_port, progress)
    return RunOutcome(measured=measured, details=details)


def _serve(signed: SignatureGraph, port: int, progress: RunProgress) -> None:
    from shoal.fields.graph.communities.serving import community_app
    from shoal.serve.http.app_server import AppOptions, serve_app

    def ready(url: str) -> None:
        progress.event("serving", url=url)
        progress.say(1.0, f"the explorer is served at {url}; Ctrl-C stops")

    options = AppOptions(port=port)
    serve_app(community_app(signed, options), options, ready=ready)


def _size(job: CommunitiesJob, query: Query) -> int:
    return max(job.size, len(query.seeds) + 1)


def _share(
    graph: CSRGraph, nodes: np.ndarray, query: Query, ids: np.ndarray, added: np.ndarray
) -> float:
    """The share of added vertices that have the label of the seeds."""
    assert graph.labels is not None
    rows = np.searchsorted(ids, added)
    return float(graph.labels.take(nodes[rows]).dense()[:, query.label].mean())
