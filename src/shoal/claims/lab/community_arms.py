"""Graphs with planted communities, exact answers beside estimated ones, and a process of its own.

Source: Condon and Karp, Algorithms for graph partitioning on the planted partition model, 2001;
Karrer and Newman, Stochastic blockmodels and community structure in networks, 2011.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import children
from shoal.core.errors import DataError, ShoalError
from shoal.core.extras import import_extra
from shoal.core.files import write_json
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.graph import CSRGraph
from shoal.fields.graph.communities import AdjacencySets, SignatureGraph
from shoal.fields.graph.communities.building import SignatureBuilder
from shoal.fields.graph.communities.inputs import (
    Query,
    dependency_graph,
    queries_of,
    signed_nodes,
)
from shoal.fields.graph.communities.job import CommunitiesJob
from shoal.fields.graph.communities.protocols import CommunityExpander, Similarities
from shoal.machine.host import peak_memory

METHODS = ("mean_similarity", "agglomerative", "pagerank")
SIZE = 50
"""Vertices that a query adds to its seeds."""
# Sizes of planted communities, the share of edges that lead anywhere, and how much degrees differ.
_SMALLEST, _LARGEST, _MIXED, _SPREAD = 300, 1000, 0.3, 0.5
_TOGETHER, _LIMIT_S = 128, 300.0
# Packages below which the graph is another one, and dependents of one that is signed.
_LEAST, _DEPENDENTS = 20_000, 5


def planted_communities(vertices: int, edges: int, seed: int) -> tuple[CSRGraph, np.ndarray]:
    """A graph of communities of 300 to 1,000 vertices, and the community of each vertex.

    Seven edges of ten stay in a community; degrees are log-normal.

    Args:
        vertices: how many.
        edges: that are drawn; those that are drawn again are merged.
        seed: of the graph.
    """
    draw = generator(seed, purpose="planted communities")
    low, high = np.log(_SMALLEST), np.log(_LARGEST)
    sizes = np.exp(draw.uniform(low, high, 2 + vertices // _SMALLEST)).astype(np.int64)
    group = np.repeat(np.arange(len(sizes)), sizes)[:vertices]
    weight = draw.lognormal(0, _SPREAD, vertices)
    ends = np.concatenate([[0.0], np.cumsum(weight)])
    begin = np.searchsorted(group, np.arange(len(sizes)))
    end = np.searchsorted(group, np.arange(len(sizes)), "right")
    source = np.repeat(np.arange(vertices), draw.multinomial(edges, weight / weight.sum()))
    anywhere = draw.random(edges) < _MIXED
    first = np.where(anywhere, 0.0, ends[begin[group[source]]])
    last = np.where(anywhere, ends[-1], ends[end[group[source]]])
    target = np.searchsorted(ends, first + draw.random(edges) * (last - first), "right") - 1
    target = np.minimum(target, vertices - 1)
    return CSRGraph.from_edges(source, target, num_nodes=vertices), group


def planted_queries(group: np.ndarray, count: int, seeds: int, seed: int) -> list[Query]:
    """Queries of some vertices of one community each.

    Args:
        group: int64 [N], of each vertex.
        count: queries.
        seeds: of each.
        seed: of what is drawn.
    """
    draw = generator(seed, purpose="queries of planted communities")
    sizes = np.bincount(group)
    large = np.flatnonzero(sizes > SIZE + seeds)
    first = np.searchsorted(group, np.arange(len(sizes)))
    return [
        Query(first[one] + draw.choice(sizes[one], seeds, False), int(one))
        for one in draw.choice(large, count)
    ]


def expander(method: str) -> CommunityExpander:
    """The part of this name."""
    part: CommunityExpander = table("community_expander").build(method)
    return part


def ask(
    graph: Similarities, queries: Sequence[Query], method: str
) -> tuple[list[np.ndarray], list[float]]:
    """Rows that each query adds, and its seconds."""
    part, answers, seconds = expander(method), [], []
    for query in queries:
        begin = time.perf_counter()
        rows = part.expand(graph, query.seeds, SIZE).rows
        seconds.append(time.perf_counter() - begin)
        answers.append(rows)
    return answers, seconds


def recall(answers: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """Recall@50: vertices of the true community that were added, over the most that could be.

    Args:
        answers: rows that were added.
        truth: bool [N] of each query, the true community without the seeds.
    """
    return float(
        np.mean(
            [
                own[rows].sum() / min(SIZE, own.sum())
                for rows, own in zip(answers, truth, strict=True)
            ]
        )
    )


def recalls(graph: Similarities, queries: Sequence[Query], group: np.ndarray) -> list[float]:
    """Recall@50 of each expansion.

    Args:
        graph: which answers.
        queries: whose labels are their communities.
        group: int64 [N], of each vertex.
    """
    truth = []
    for query in queries:
        truth.append(group == query.label)
        truth[-1][query.seeds] = False
    return [recall(ask(graph, queries, method)[0], truth) for method in METHODS]


def package_queries(
    queries: int, seeds: int
) -> tuple[SignatureGraph, AdjacencySets, list[Query], np.ndarray]:
    """Packages by their dependents: signed, exact, queries of a section each, and all sections.

    Args:
        queries: that are drawn; those of small sections are left out.
        seeds: of each.

    Raises:
        DataError: the index of packages is missing, or lacks most of them.
    """
    graph = dependency_graph()
    if graph.num_nodes < _LEAST:
        raise DataError(f"{graph.num_nodes:,} packages; apt-get update fetches the others")
    job = CommunitiesJob(
        data="packages", least_degree=_DEPENDENTS, queries=queries, seeds_each=seeds
    )
    nodes, sets = signed_nodes(job, graph)
    assert graph.labels is not None
    # Candidates share one slot in a few, for sets of dependents have little in common.
    signed = SignatureGraph.from_edges(graph, side="in", least_degree=_DEPENDENTS, threshold=0.02)
    known = graph.labels.take(nodes)
    sections = np.full(len(nodes), len(known.names))
    there = np.flatnonzero(np.diff(known.indptr))
    sections[there] = known.indices[known.indptr[there]]
    large = np.bincount(sections) > SIZE + seeds
    asked = [one for one in queries_of(job, graph.labels, nodes) if large[one.label]]
    return signed, sets, asked, sections


def all_pairs_s(sets: AdjacencySets) -> float:
    """Seconds of the similarities of all pairs of vertices, by what they have in common."""
    begin = time.perf_counter()
    rows = np.arange(len(sets.sizes))
    for first in range(0, len(rows), _TOGETHER):
        sets.with_all(rows[first : first + _TOGETHER], later=True)
    return time.perf_counter() - begin


def scipy_rows_s(sets: AdjacencySets, rows: np.ndarray) -> float:
    """Seconds of a product of sparse matrices of SciPy: what some rows share with all others."""
    ones, others = sets.sets.astype(np.float32), sets.inverse.astype(np.float32)
    begin = time.perf_counter()
    shared = ones[rows] @ others
    passed = time.perf_counter() - begin
    assert shared.nnz
    return passed


def rows_s(sets: AdjacencySets, rows: np.ndarray) -> float:
    """Seconds of the similarities of some rows with all others."""
    begin = time.perf_counter()
    sets.with_all(rows)
    return time.perf_counter() - begin


def datasketch_signatures(graph: CSRGraph, count: int, hashes: int) -> tuple[np.ndarray, float]:
    """Signatures of the first vertices by datasketch, uint32 [count, hashes], and its seconds.

    Members are their own 32-bit hashes, as they are here.
    """
    datasketch: Any = import_extra("datasketch", extra="bench", purpose="the peer of the claim")
    lists = [graph.indices[graph.indptr[at] : graph.indptr[at + 1]].tolist() for at in range(count)]
    begin = time.perf_counter()
    empty = datasketch.MinHash(hashes, seed=1, hashfunc=int, scheme="affine32")
    rows = []
    for members in lists:
        one = empty.copy()
        one.update_batch(members)
        rows.append(one.hashvalues)
    return np.array(rows), time.perf_counter() - begin


def own_signatures(graph: CSRGraph, count: int, hashes: int) -> tuple[np.ndarray, float]:
    """The same signatures by one thread, and its seconds."""
    begin = time.perf_counter()
    builder = SignatureBuilder(hashes)
    ends = graph.indptr[: count + 1]
    builder.put(np.arange(count), ends, graph.indices[: ends[-1]])
    passed = time.perf_counter() - begin
    return builder.signatures, passed


def follows(accounts: int, followers: int, seed: int) -> CSRGraph:
    """Accounts with 5,000 followers and more: an edge from each follower.

    Args:
        accounts: how many.
        followers: of each, on average.
        seed: of the graph.
    """
    draw = generator(seed, purpose="followers")
    sizes = draw.poisson(followers, accounts)
    target = np.repeat(np.arange(accounts), sizes)
    source = accounts + draw.integers(0, 100 * followers, len(target))
    people = accounts + 100 * followers
    return CSRGraph.from_edges(source, target, num_nodes=people, directed=True)


def alone(graph: Path, queries: Sequence[Query], exact: bool, place: Path) -> dict[str, float]:
    """What a process of its own measures: seconds of the slowest query, and its peak of memory.

    Args:
        graph: directory of a graph.
        queries: that it answers by every method.
        exact: by exact similarities.
        place: a directory.

    Raises:
        ShoalError: the process has failed.
    """
    write_json(place / "queries.json", [query.seeds.tolist() for query in queries])
    module = "shoal.claims.lab.community_arms"
    process = children.start(module, str(graph), str(int(exact)), str(place))
    if process.wait(_LIMIT_S):
        raise ShoalError(f"communities: the process failed with {process.returncode}")
    said: dict[str, float] = json.loads((place / "alone.json").read_bytes())
    return said


def main() -> None:
    """Sign a graph that is mapped, answer queries, and write the slowest and the peak."""
    from shoal.fields.graph.communities.adjacency import sets_of

    path, exact, place = Path(sys.argv[1]), bool(int(sys.argv[2])), Path(sys.argv[3])
    graph = CSRGraph.open(path)
    begin = time.perf_counter()
    asked: Similarities = (
        AdjacencySets(sets_of(graph, "both")) if exact else SignatureGraph.from_edges(graph)
    )
    build_s = time.perf_counter() - begin
    seeds = json.loads((place / "queries.json").read_bytes())
    queries = [Query(np.array(one, np.int64), -1) for one in seeds]
    slowest = max(max(ask(asked, queries, method)[1]) for method in METHODS)
    said = {"slowest_s": slowest, "peak_bytes": peak_memory(), "build_s": build_s}
    write_json(place / "alone.json", said)


if __name__ == "__main__":
    main()
