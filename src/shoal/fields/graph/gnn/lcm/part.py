"""The part ``lcm``: a learned commutative operator in a balanced tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.graph.gnn.protocols import AggregateWork
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import nn

# Counted over the operators of a level, forward and backward.
_CALLS = 27


@part
class LearnableMonoid:
    """Fold the neighbours in a balanced tree with a learned commutative operator.

    It is commutative exactly, and associative as far as it has learned to be.

    Source: Ong and Veličković, Learnable Commutative Monoids for Graph Neural Networks, 2022.

    Args:
        operator: what is made symmetric: a gated recurrent unit, or a perceptron with one hidden
            layer.
        associative_weight: of the penalty on ``(a o b) o c - a o (b o c)``.
        identity_weight: of the penalty on ``a o e - a``.
    """

    operator: Literal["gru", "mlp"] = "gru"
    associative_weight: Annotated[float, Ge(0)] = 0.1
    identity_weight: Annotated[float, Ge(0)] = 0.1

    def depth(self, n: int) -> int:
        """Levels of the tree."""
        return max(n - 1, 0).bit_length()

    def estimate(self, work: AggregateWork, machine: Machine) -> Estimate:
        """An operator for each neighbour, which sees both orders."""
        cells, width = float(work.entries), work.width
        return work.estimate(
            flops=24.0 * cells * width**2 + 2 * (cells + work.segments) * width**2,
            numbers=26 * cells * width,
            gathered=3 * cells * width,
            calls=_CALLS * (self.depth(work.largest) + 4),
            kept=16 * cells * width,
        )

    def module(self, width: int) -> nn.Module:
        """Encoder, tree and decoder."""
        from shoal.fields.graph.gnn.lcm.monoid import GRUPair, MLPPair, MonoidFold

        pair = {"gru": GRUPair, "mlp": MLPPair}[self.operator](width)
        return MonoidFold(
            width, pair, associative_weight=self.associative_weight,
            identity_weight=self.identity_weight,
        )  # fmt: skip
