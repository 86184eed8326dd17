"""A graph neural network over compressed rows: messages of neighbours, pooled by any aggregator.

Source: Hamilton et al., Inductive Representation Learning on Large Graphs (GraphSAGE), 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.parts import Choice, table
from shoal.fields.graph.gnn.protocols import NeighbourAggregator


def aggregator_of(choice: str | Mapping[str, Any] | Choice, width: int) -> nn.Module:
    """The module of an aggregator.

    Args:
        choice: its name, or its name with options.
        width: numbers of a vector.

    Raises:
        ConfigError: there is no such aggregator, or an option is wrong.
    """
    method: NeighbourAggregator = table("aggregator").build(choice, where="aggregator")
    return method.module(width)


class SAGEConv(nn.Module):
    """``W x_i + V pool({x_j: j a neighbour of i})``, with an offset.

    Args:
        in_width: numbers of a vector that comes in.
        out_width: of one that goes out.
        aggregator: a part of kind ``aggregator``, such as ``lcm``, perhaps with options.
    """

    def __init__(
        self, in_width: int, out_width: int, aggregator: str | Mapping[str, Any] | Choice = "mean"
    ) -> None:
        super().__init__()
        self.aggregator = aggregator_of(aggregator, in_width)
        self.of_self = nn.Linear(in_width, out_width, bias=False)
        self.of_pooled = nn.Linear(in_width, out_width)

    def forward(self, x: Tensor, ptr: Tensor, neighbours: Tensor) -> Tensor:
        """Vectors of all nodes, [N, out_width]; of a sampled block those of its first nodes.

        Args:
            x: [N, in_width], or more rows, of which the first are those of ``ptr``.
            ptr: int64 [N + 1], rows of the graph.
            neighbours: int64 [nnz], the neighbours of each row, places in ``x``.
        """
        pool: Any = self.aggregator  # an Aggregator
        own = x[: len(ptr) - 1]
        result: Tensor = self.of_self(own) + self.of_pooled(pool(x[neighbours], ptr))
        return result

    def penalty(self) -> Tensor:
        """What the aggregator adds to the loss."""
        pool: Any = self.aggregator
        added: Tensor = pool.penalty()
        return added


class GraphSAGE(nn.Module):
    """A linear layer, convolutions that keep the width, and a classifier.

    Args:
        features: numbers of a node's vector.
        hidden: numbers of a hidden one.
        classes: that nodes are assigned to.
        layers: convolutions, at least 1.
        aggregator: as of :class:`SAGEConv`.
        dropout: share of numbers that are left out before each layer, in training.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        classes: int,
        *,
        layers: int = 2,
        aggregator: str | Mapping[str, Any] | Choice = "mean",
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.convs = nn.ModuleList(SAGEConv(hidden, hidden, aggregator) for _ in range(layers))
        self.leave = nn.Linear(hidden, classes)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, ptr: Tensor, neighbours: Tensor) -> Tensor:
        """Scores of classes, [N, classes]; arguments as of :class:`SAGEConv`."""
        return self.on_blocks(x, [(ptr, neighbours)] * len(self.convs))

    def on_blocks(self, x: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Scores of the nodes that the last block gives.

        Args:
            x: [n, features], of the nodes that the first block reads.
            blocks: pointer and neighbours of each convolution, as of :class:`SAGEConv`.
        """
        x = torch.relu(self.enter(self.drop(x)))
        for conv, (ptr, neighbours) in zip(self.convs, blocks, strict=True):
            x = torch.relu(conv(self.drop(x), ptr, neighbours))
        scores: Tensor = self.leave(self.drop(x))
        return scores

    def penalty(self) -> Tensor:
        """What all aggregators add to the loss."""
        added: list[Any] = [*self.convs]
        return torch.stack([conv.penalty() for conv in added]).sum()
