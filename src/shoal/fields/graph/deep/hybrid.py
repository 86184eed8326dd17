"""The split ``hybrid``: a pipeline of layers whose stages are each shared by nodes.

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.graph.deep.protocols import DeepGnnError, RankGrid


@part
class HybridSplit:
    """Stages of several ranks, each with some of the nodes.

    Args:
        parts: ranks of a stage.
        chunks: of the nodes, for each stage.
    """

    parts: Annotated[int, Ge(1), Le(1024)] = 2
    chunks: Annotated[int, Ge(1), Le(1024)] = 4

    def grid(self, ranks: int) -> RankGrid:
        """As many stages as the ranks give."""
        if ranks % self.parts:
            raise DeepGnnError(
                f"ranks = {ranks}: split hybrid has {self.parts} ranks a stage; expected a "
                f"multiple of {self.parts}"
            )
        stages = ranks // self.parts
        return RankGrid(stages=stages, parts=self.parts, chunks=self.chunks * stages)
