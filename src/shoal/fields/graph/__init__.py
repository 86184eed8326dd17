"""graph: graphs in compressed rows, and embeddings of their nodes.

Start reading at ``graph.py``, then ``embedding/protocols.py`` and ``embedding/fastrp/``.
:func:`embed` is the call of Python programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import PartTable, lazy_names

if TYPE_CHECKING:
    from shoal.fields.graph.embedding.call import embed
    from shoal.fields.graph.embedding.fastrp.model import FastRPModel
    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.fields.graph.gnn.network import GraphSAGE, SAGEConv
    from shoal.fields.graph.graph import CSRGraph, NodeLabels
    from shoal.fields.graph.loading import graph_of, package_graph, read_graph, read_labels
    from shoal.fields.graph.sample.loader import NeighborLoader
    from shoal.fields.graph.sample.neighbours import NeighbourSampler

__all__ = [
    "AGGREGATORS",
    "FEATURE_SOURCES",
    "NODE_EMBEDDERS",
    "CSRGraph",
    "FastRPModel",
    "FeatureTable",
    "GraphSAGE",
    "NeighborLoader",
    "NeighbourSampler",
    "NodeLabels",
    "SAGEConv",
    "embed",
    "graph_of",
    "package_graph",
    "read_graph",
    "read_labels",
]

NODE_EMBEDDERS = PartTable(
    "node_embedder",
    {
        "fastrp": "shoal.fields.graph.embedding.fastrp.part:FastRP",
        "graphvite": "shoal.fields.graph.embedding.graphvite.part:GraphVite",
        "deepwalk": "shoal.fields.graph.embedding.deepwalk:DeepWalk",
    },
    about=(
        "How nodes of a graph become vectors. Chosen by the key `method` of a job with "
        "`job: embed_nodes`."
    ),
    protocol="shoal.fields.graph.embedding.protocols:NodeEmbedder",
)

AGGREGATORS = PartTable(
    "aggregator",
    {
        "mean": "shoal.fields.graph.gnn.mean:MeanAggregator",
        "sum": "shoal.fields.graph.gnn.sum:SumAggregator",
        "max": "shoal.fields.graph.gnn.max:MaxAggregator",
        "gru": "shoal.fields.graph.gnn.gru.part:GRUFold",
        "lcm": "shoal.fields.graph.gnn.lcm.part:LearnableMonoid",
    },
    about=(
        "How the vectors of a node's neighbours become one. Chosen by the key `aggregator` of a "
        "job with `job: train_gnn`."
    ),
    protocol="shoal.fields.graph.gnn.protocols:NeighbourAggregator",
)

FEATURE_SOURCES = PartTable(
    "feature_source",
    {
        "direct": "shoal.fields.graph.gather.direct:DirectFeatures",
        "staged": "shoal.fields.graph.gather.staged:StagedFeatures",
        "resident": "shoal.fields.graph.gather.resident:ResidentFeatures",
    },
    about=(
        "How features of the nodes of a batch come from host memory to where it is trained on. "
        "Chosen by the key `placement` of a job with `job: train_gnn` that has `fanouts`."
    ),
    protocol="shoal.fields.graph.gather.protocols:FeaturePlacement",
)

__getattr__ = lazy_names(
    __name__,
    FeatureTable="gather.table",
    NeighborLoader="sample.loader",
    NeighbourSampler="sample.neighbours",
    GraphSAGE="gnn.network",
    SAGEConv="gnn.network",
    FastRPModel="embedding.fastrp.model",
    CSRGraph="graph",
    NodeLabels="graph",
    embed="embedding.call",
    graph_of="loading",
    package_graph="loading",
    read_graph="loading",
    read_labels="loading",
)
