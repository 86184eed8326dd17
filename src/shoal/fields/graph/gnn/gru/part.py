"""The part ``gru``: neighbours folded one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.graph.gnn.protocols import AggregateWork
from shoal.ir import Estimate, Interval, Machine

if TYPE_CHECKING:
    from torch import nn


@part
class GRUFold:
    """Fold the neighbours from left to right with a gated recurrent unit, in a random order.

    Source: Cohen-Karlik et al., Regularizing Towards Permutation Invariance in Recurrent Models,
    2020.

    Args:
        order_weight: of the penalty on what two neighbours change when they swap places.
    """

    order_weight: Annotated[float, Ge(0)] = 0.1

    def depth(self, n: int) -> int:
        """One step after the other."""
        return n

    def estimate(self, work: AggregateWork, machine: Machine) -> Estimate:
        """A cell for each neighbour, and as many steps as the largest set has."""
        cells, width = float(work.entries), work.width
        found = work.estimate(
            flops=12.0 * cells * width**2, numbers=12 * cells * width, gathered=cells * width,
            calls=60, kept=14 * cells * width,
        )  # fmt: skip
        steps = work.largest * work.rates.step_s
        terms = {**found.terms_s, "overhead": found.terms_s["overhead"] + steps}
        return found.model_copy(
            update={
                "terms_s": terms,
                "step_s": Interval.around(sum(terms.values()), work.rates.spread),
                "bound": max(terms, key=lambda name: terms[name]),
            }
        )

    def module(self, width: int) -> nn.Module:
        """A recurrent network over all sets at once."""
        from shoal.fields.graph.gnn.gru.recurrent import Recurrent

        return Recurrent(width, order_weight=self.order_weight)
