"""What aggregators promise, and values that all of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import Tensor, nn


class GnnError(ConfigError, ValueError):
    """Segments, widths or graphs that a network cannot use."""


class GnnRates(Value):
    """What a training step takes on one core, forward and backward pass together.

    Args:
        flop_s: seconds for a floating-point operation of a matrix product.
        number_s: for a number that an elementwise operator writes.
        gather_s: for a number of a row that is gathered by its index.
        call_s: for an operator on few numbers.
        step_s: for a step of a recurrent network on one short row.
        spread: of what follows from them.
    """

    flop_s: float
    number_s: float
    gather_s: float
    call_s: float
    step_s: float
    spread: float


class AggregateWork(Value):
    """What is pooled in one layer.

    Args:
        segments: sets that are pooled, empty ones included.
        entries: rows in all of them.
        largest: rows of the largest.
        width: numbers of a row.
        rates: of a core.
    """

    segments: int
    entries: int
    largest: int
    width: int
    rates: GnnRates

    def estimate(
        self, *, flops: float, numbers: float, gathered: float, calls: float, kept: float
    ) -> Estimate:
        """Seconds and bytes of counted work.

        Args:
            flops: of matrix products in the forward pass; the backward pass has twice as many.
            numbers: that elementwise operators write in the forward pass.
            gathered: numbers of rows that are gathered.
            calls: operators one after the other.
            kept: numbers that are kept for the backward pass.
        """
        from shoal.ir import Interval

        terms = {
            "matmul": 3.0 * flops * self.rates.flop_s,
            "memory": numbers * self.rates.number_s + gathered * self.rates.gather_s,
            "overhead": calls * self.rates.call_s,
        }
        return Estimate(
            step_s=Interval.around(sum(terms.values()), self.rates.spread),
            terms_s=terms,
            memory_bytes={"activations": 4.0 * kept},
            flops=3.0 * flops,
            bound=max(terms, key=lambda name: terms[name]),
        )


class Aggregator(Protocol):
    """Pools sets of vectors: a ``torch.nn.Module``."""

    def __call__(self, x: Tensor, ptr: Tensor) -> Tensor:
        """A vector of each set.

        Args:
            x: [n, width], the vectors of all sets, one set after the other.
            ptr: int64 [S + 1], ascending from 0 to n; set ``s`` is ``x[ptr[s]:ptr[s + 1]]``.

        Returns:
            [S, width].

        Raises:
            GnnError: the pointer or the width does not fit.
        """

    def penalty(self) -> Tensor:
        """What the last call in training adds to the loss; 0 where nothing is to be learned so."""


@runtime_checkable
class NeighbourAggregator(Protocol):
    """A way to pool the neighbours of a node: a part of kind ``aggregator``."""

    def depth(self, n: int) -> int:
        """Operations that must follow one another to pool ``n`` vectors."""

    def estimate(self, work: AggregateWork, machine: Machine) -> Estimate:
        """Seconds (``step_s``) and bytes of one layer, both passes; allocates nothing."""

    def module(self, width: int) -> nn.Module:
        """An :class:`Aggregator` of vectors of ``width`` numbers, with fresh parameters."""
