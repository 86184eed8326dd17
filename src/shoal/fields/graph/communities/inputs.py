"""The graph of a job ``communities``, and the queries that it asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import require
from shoal.core.files import expanded
from shoal.core.random import generator
from shoal.fields.graph.communities.adjacency import AdjacencySets, sets_of
from shoal.fields.graph.communities.job import CommunitiesJob
from shoal.fields.graph.communities.protocols import CommunityError
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.fields.graph.loading import PACKAGES, package_graph, read_graph, read_labels


@dataclass(frozen=True)
class Query:
    """Seeds, and the label that they have in common.

    Args:
        seeds: int64, nodes of the graph.
        label: place of its name; -1 if there is none.
    """

    seeds: np.ndarray
    label: int


def dependency_graph(labels: str = "section", root: Path = Path("/")) -> CSRGraph:
    """This machine's packages; an edge leads from one to another that it depends on.

    Args:
        labels: ``section`` or ``tags``.
        root: of the system.

    Raises:
        DataError: there is no index of packages.
        GraphError: other labels are wanted.
    """
    return package_graph(labels, root, directed=True)


def graph_of_job(job: CommunitiesJob) -> CSRGraph:
    """Read the graph and its labels.

    Raises:
        DataError: a file cannot be read.
        GraphError: it is no graph.
    """
    if job.data == PACKAGES:
        return dependency_graph(job.labels or "section")
    graph = read_graph(job.data, directed=job.directed)
    return graph.with_labels(read_labels(expanded(job.labels), graph)) if job.labels else graph


def signed_nodes(job: CommunitiesJob, graph: CSRGraph) -> tuple[np.ndarray, AdjacencySets]:
    """Nodes with enough neighbours, ascending by name as their signatures are, and their sets.

    Raises:
        CommunityError: there are none.
    """
    sets = sets_of(graph, job.side)
    nodes = np.flatnonzero(np.diff(sets.indptr) >= job.least_degree)
    require(
        len(nodes) > 0, "least_degree", job.least_degree, error=CommunityError,
        expected="what some node has: neighbours on this side of the edges",
    )  # fmt: skip
    if graph.ids is not None:
        nodes = nodes[np.argsort(graph.ids[nodes], kind="stable")]
    return nodes, AdjacencySets(sets[nodes])


def queries_of(job: CommunitiesJob, labels: NodeLabels | None, nodes: np.ndarray) -> list[Query]:
    """Queries that are drawn: some nodes of one label, or one node where there are no labels.

    Args:
        job: says how many.
        labels: of the graph's nodes.
        nodes: that are signed.

    Returns:
        Queries whose seeds are rows: places among ``nodes``.
    """
    draw = generator(job.seed, purpose="queries of communities")
    if labels is None:
        return [Query(draw.integers(0, len(nodes), 1), -1) for _ in range(job.queries)]
    known = labels.take(nodes)
    rows = np.repeat(np.arange(len(nodes)), np.diff(known.indptr))
    order = np.argsort(known.indices, kind="stable")
    groups = np.split(rows[order], np.cumsum(np.bincount(known.indices, minlength=1))[:-1])
    large = [at for at, group in enumerate(groups) if len(group) > job.seeds_each]
    require(
        len(large) > 0, "seeds_each", job.seeds_each, error=CommunityError,
        expected="fewer than the nodes of some label",
    )  # fmt: skip
    # A label is drawn as often as it has nodes.
    chance = np.array([len(groups[at]) for at in large], float)
    drawn = draw.choice(large, job.queries, p=chance / chance.sum())
    return [Query(draw.choice(groups[at], job.seeds_each, False), int(at)) for at in drawn]


def seeds_of(text: str) -> list[str]:
    """Names of seeds that are given, with commas between them."""
    return [one.strip() for one in text.split(",") if one.strip()]
