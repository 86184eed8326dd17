"""Embedding nodes from Python: one call."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import require
from shoal.core.parts import Choice, table
from shoal.fields.graph.embedding.judging import divided, only
from shoal.fields.graph.embedding.protocols import NodeEmbedder, NodeEmbedding
from shoal.fields.graph.loading import graph_of


def embed(
    graph: Any,
    method: str = "fastrp",
    *,
    seed: int = 0,
    threads: int = 1,
    tuning_share: float = 0.01,
    **options: Any,
) -> NodeEmbedding:
    """Make a vector of each node.

    Args:
        graph: what :func:`~shoal.fields.graph.graph_of` takes: a CSRGraph, a sparse matrix, a
            NetworkX graph, torch-geometric's ``Data``, or a path.
        method: a part of kind ``node_embedder``, such as ``fastrp``.
        seed: of what is random.
        threads: that work.
        tuning_share: of the labels of the graph, by which options of "tune" are chosen.
        options: of the method, such as ``dim``, ``weights`` and ``beta``.

    Raises:
        GraphError: it is no graph.
        EmbeddingError: it cannot be embedded so; options are to be tuned, and it has no labels.
        ConfigError: an option that the method does not have, or with a wrong value.
    """
    require(threads >= 1, "threads", threads, expected="at least 1")
    require(0 < tuning_share < 1, "tuning_share", tuning_share, expected="a number in (0, 1)")
    part: NodeEmbedder = table("node_embedder").build(Choice(name=method, options=options))
    known = graph_of(graph)
    tuning = None
    if known.labels is not None and len(known.labels.labelled) >= 10:
        nodes = divided(known.labels, train_share=0.5, tuning_share=tuning_share, most=0, seed=seed)
        tuning = only(known.labels, nodes.tuning)
    return part.fit(known, seed=seed, threads=threads, tuning=tuning)
