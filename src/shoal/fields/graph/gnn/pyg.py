"""Aggregators of Shoal in networks of torch-geometric.

Source: Fey and Lenssen, Fast Graph Representation Learning with PyTorch Geometric, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.extras import import_extra
from shoal.core.parts import Choice
from shoal.fields.graph.gnn.network import aggregator_of
from shoal.fields.graph.gnn.protocols import GnnError

_nn: Any = import_extra(
    "torch_geometric.nn", extra="graph", purpose="an aggregator of its networks"
)


class PooledAggregation(_nn.Aggregation):  # type: ignore[misc]
    """An aggregator as torch-geometric's convolutions take one, in the place of ``aggr``.

    Args:
        width: numbers of a vector.
        aggregator: a part of kind ``aggregator``, perhaps with options.
    """

    def __init__(self, width: int, aggregator: str | Mapping[str, Any] | Choice = "lcm") -> None:
        super().__init__()
        self.pool = aggregator_of(aggregator, width)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Pool rows of ``x``.

        Args:
            x: [n, width].
            index: int64 [n], the set of each row, in any order; None for one set of all.
            ptr: int64 [S + 1]; None for the sets of ``index``.
            dim_size: S; None for what ``index`` names.
            dim: of the rows.

        Raises:
            GnnError: other dimensions are to be pooled.
        """
        if x.dim() != 2 or dim not in (-2, 0):
            raise GnnError(f"x: {list(x.shape)}, dim = {dim}: expected [n, width] and -2")
        if ptr is None:
            index = x.new_zeros(len(x), dtype=torch.int64) if index is None else index
            order = index.argsort(stable=True)
            sizes = index.bincount(minlength=dim_size or 0)
            x, ptr = x[order], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        result: Tensor = self.pool(x, ptr)
        return result

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for module in self.pool.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def penalty(self) -> Tensor:
        """What the last call in training adds to the loss."""
        pool: Any = self.pool  # an Aggregator
        result: Tensor = pool.penalty()
        return result
