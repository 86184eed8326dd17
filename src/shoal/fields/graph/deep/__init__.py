"""deep: a deep graph network on several ranks, cut by nodes, by layers, or by both."""

from __future__ import annotations

from shoal.core.parts import PartTable

__all__ = ["GRAPH_SPLITS"]

GRAPH_SPLITS = PartTable(
    "graph_split",
    {
        "pipe": "shoal.fields.graph.deep.pipe:LayerPipe",
        "nodes": "shoal.fields.graph.deep.nodes:NodeSplit",
        "hybrid": "shoal.fields.graph.deep.hybrid:HybridSplit",
    },
    about=(
        "How ranks share a deep graph network. Chosen by the key `split` of a job with "
        "`job: train_deep_gnn`."
    ),
    protocol="shoal.fields.graph.deep.protocols:GraphSplit",
)
