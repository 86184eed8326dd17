"""What ways to share a deep graph network promise, and the values that they share."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from shoal.core.config import Value
from shoal.core.errors import ConfigError


class DeepGnnError(ConfigError, ValueError):
    """A graph, or a number of ranks, that a deep network cannot be trained with."""


class RankGrid(Value):
    """How ranks share layers and nodes.

    Rank ``stage * parts + part`` has the layers of its stage, for the nodes of its part.

    Args:
        stages: groups of consecutive layers.
        parts: sets of nodes.
        chunks: of the nodes, which pass the stages one after the other; with one, all that is
            computed is current, and with more, neighbours in chunks to come are those of the epoch
            before.
    """

    stages: int
    parts: int
    chunks: int

    @property
    def world(self) -> int:
        """Ranks."""
        return self.stages * self.parts


@runtime_checkable
class GraphSplit(Protocol):
    """A way to share a deep network: a part of kind ``graph_split``."""

    def grid(self, ranks: int) -> RankGrid:
        """How so many ranks share it.

        Raises:
            DeepGnnError: they cannot.
        """
