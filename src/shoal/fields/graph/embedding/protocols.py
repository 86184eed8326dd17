"""What node embedders promise, and values that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.ir import Estimate, Machine


class EmbeddingError(ConfigError, ValueError):
    """A graph that cannot be embedded, or not so."""


@dataclass(frozen=True)
class NodeEmbedding:
    """A vector of each node.

    Args:
        vectors: float32 [N, dim].
        isolated: int64, nodes without neighbours, of which a vector says nothing.
        details: what the method has chosen or counted, as JSON.
    """

    vectors: np.ndarray
    isolated: np.ndarray
    details: Mapping[str, Any] = field(default_factory=dict)


class EmbedRates(Value):
    """What steps of embedders take on one core.

    Args:
        add_s: seconds for a number of a neighbour's vector to be fetched and added.
        draw_s: for a number of a random projection.
        pass_s: for a number of a vector that is scaled, mixed and written.
        walk_s: for a step of a random walk.
        word_s: for a number of a vector of a node that word2vec trains on, with one negative.
        spread: of what follows from them.
    """

    add_s: float
    draw_s: float
    pass_s: float
    walk_s: float
    word_s: float
    spread: float


class EmbedWork(Value):
    """What is embedded.

    Args:
        num_nodes: nodes.
        nnz: entries of the adjacency matrix.
        tuning: nodes whose labels the method may choose its options by.
        threads: that work.
        rates: of a core.
    """

    num_nodes: int
    nnz: int
    tuning: int
    threads: int
    rates: EmbedRates


@runtime_checkable
class NodeEmbedder(Protocol):
    """A way to make vectors of nodes: a part of kind ``node_embedder``."""

    @property
    def dim(self) -> int:
        """Numbers of a vector."""

    def estimate(self, work: EmbedWork, machine: Machine) -> Estimate:
        """Seconds (``step_s``) and bytes; allocates nothing."""

    def fit(
        self, graph: CSRGraph, *, seed: int, threads: int = 1, tuning: NodeLabels | None = None
    ) -> NodeEmbedding:
        """Embed all nodes.

        Args:
            graph: with N nodes.
            seed: of what is random.
            threads: that work.
            tuning: labels by which options may be chosen; nodes that must not be looked at have
                none here.

        Raises:
            EmbeddingError: the graph has what the method cannot use.
        """
