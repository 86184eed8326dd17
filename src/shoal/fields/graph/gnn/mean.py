"""The part ``mean``: see :class:`MeanAggregator`."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.graph.gnn.reduction import ReductionAggregator


@part
class MeanAggregator(ReductionAggregator):
    """Take the mean of the vectors of neighbours.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs, 2017.
    """

    how: ClassVar = "mean"
