"""What aggregators share that are one reduction of all sets at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from shoal.fields.graph.gnn.protocols import AggregateWork
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import nn


class ReductionAggregator:
    """Base of an aggregator whose numbers are each read once."""

    how: ClassVar[Literal["sum", "mean", "max"]]

    def depth(self, n: int) -> int:
        """Of a tree of ``n`` vectors."""
        return max(n - 1, 0).bit_length()

    def estimate(self, work: AggregateWork, machine: Machine) -> Estimate:
        """Every number is read once."""
        numbers = float(work.entries * work.width)
        return work.estimate(flops=0, numbers=2 * numbers, gathered=0, calls=4, kept=numbers)

    def module(self, width: int) -> nn.Module:
        """A reduction of all sets at once."""
        from shoal.fields.graph.gnn.segments import SegmentReduction

        return SegmentReduction(self.how)
