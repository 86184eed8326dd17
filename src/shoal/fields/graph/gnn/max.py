"""The part ``max``: see :class:`MaxAggregator`."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.graph.gnn.reduction import ReductionAggregator


@part
class MaxAggregator(ReductionAggregator):
    """Take the largest number of each column of the vectors of neighbours.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs, 2017 (section 3.3).
    """

    how: ClassVar = "max"
