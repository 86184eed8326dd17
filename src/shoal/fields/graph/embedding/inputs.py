"""The graph of a job ``embed_nodes``, with its labels."""

from __future__ import annotations

from shoal.core.files import expanded
from shoal.fields.graph.embedding.job import EmbedNodesJob
from shoal.fields.graph.embedding.judging import JudgedNodes, divided, only
from shoal.fields.graph.embedding.protocols import EmbeddingError
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.fields.graph.loading import PACKAGES, package_graph, read_graph, read_labels


def graph_of_job(job: EmbedNodesJob) -> CSRGraph:
    """Read the graph and its labels.

    Raises:
        DataError: a file cannot be read.
        GraphError: it is no graph, or has no nodes.
    """
    if job.data == PACKAGES:
        graph = package_graph(job.labels or "section")
    else:
        graph = read_graph(job.data, directed=job.directed)
        if job.labels:
            graph = graph.with_labels(read_labels(expanded(job.labels), graph))
    if not graph.num_nodes:
        raise EmbeddingError(f"data = {job.data}: a graph without nodes; expected edges")
    return graph.largest_component() if job.largest_component else graph


def judged_nodes(job: EmbedNodesJob, graph: CSRGraph) -> tuple[JudgedNodes, NodeLabels] | None:
    """How nodes with labels are divided, and the labels that a method may look at.

    None if the graph has no labels.
    """
    if graph.labels is None:
        return None
    nodes = divided(
        graph.labels, train_share=job.train_share, tuning_share=job.tuning_share, most=job.judged,
        seed=job.seed,
    )  # fmt: skip
    return nodes, only(graph.labels, nodes.tuning)
