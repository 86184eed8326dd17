"""The split ``pipe``: every rank has some layers for the whole graph, whose chunks pass through.

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.graph.deep.protocols import RankGrid


@part
class LayerPipe:
    """A pipeline of layers; what neighbours in later chunks are comes from the epoch before.

    Args:
        chunks: of the nodes, for each stage.
    """

    chunks: Annotated[int, Ge(1), Le(1024)] = 4

    def grid(self, ranks: int) -> RankGrid:
        """A stage for each rank."""
        return RankGrid(stages=ranks, parts=1, chunks=self.chunks * ranks)
