"""Train on sampled batches of this machine's packages, with features gathered in three ways.

    python examples/graph/gather_features.py

Without a package index a planted graph takes its place.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from shoal.core.errors import DataError
from shoal.fields.graph import FeatureTable, GraphSAGE, NeighborLoader, read_graph

try:
    graph = read_graph("packages")
except DataError:
    graph = read_graph("planted:5000")
degrees = np.diff(graph.indptr)
features = torch.randn(graph.num_nodes, 129)
nodes = np.arange(0, graph.num_nodes, 20)
for placement in ("staged", "direct", "resident"):
    torch.manual_seed(0)
    network = GraphSAGE(129, 32, 8)
    # A memory of 50 MB/s, so that what it moves is felt.
    with FeatureTable(
        features, placement, batch_rows=graph.num_nodes, heat=degrees, host_bytes_per_s=5e7
    ) as table:
        begin = time.perf_counter()
        for batch in NeighborLoader(graph, (10, 5), table, nodes=nodes, batch_size=512):
            network.on_blocks(batch.x, batch.blocks).square().mean().backward()
        seconds, counters = time.perf_counter() - begin, table.counters()
    print(
        f"{placement:9} {seconds:5.2f} s, {counters.host_bytes / 1e6:6.1f} MB moved by the host, "
        f"waited {counters.stall_s:.2f} s"
    )
