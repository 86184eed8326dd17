"""The split ``nodes``: every rank has all layers for some nodes, and fetches their neighbours."""

from __future__ import annotations

from shoal.core.parts import part
from shoal.fields.graph.deep.protocols import RankGrid


@part
class NodeSplit:
    """Graph parallelism: exact, with an exchange of neighbours in every layer, both ways."""

    def grid(self, ranks: int) -> RankGrid:
        """A set of nodes for each rank."""
        return RankGrid(stages=1, parts=ranks, chunks=1)
