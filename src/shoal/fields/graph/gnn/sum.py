"""The part ``sum``: see :class:`SumAggregator`."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.graph.gnn.reduction import ReductionAggregator


@part
class SumAggregator(ReductionAggregator):
    """Add the vectors of neighbours.

    Source: Xu et al., How Powerful are Graph Neural Networks?, 2019.
    """

    how: ClassVar = "sum"
