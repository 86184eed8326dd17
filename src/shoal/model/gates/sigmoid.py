"""Scores that do not compete, and a bias that balances loads without a loss.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, equations 12 to 16; Wang et al.,
Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.model.gates.base import BaseGate, best_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult

_BIAS = "router_bias"


@part
class Sigmoid(BaseGate):
    """The top-k experts by sigmoid score plus bias, weighted by the scores, as DeepSeek-V3.

    In every step the bias of an expert is increased if fewer tokens than the mean chose it, and
    decreased otherwise. It has no gradient, is equal on all ranks and is saved with the model.

    Args:
        bias_rate: change of a bias per step, at least 0; 0 keeps the biases constant.
    """

    bias_rate: Annotated[float, Ge(0), Le(1)] = 0.001
    kept: ClassVar[frozenset[str]] = frozenset({_BIAS})

    def shapes(self, hidden: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Parameters of the router by their names in the layer, the matrix last."""
        return {_BIAS: (num_experts,), **BaseGate.shapes(self, hidden, num_experts)}

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        score_NE = logits_NE.sigmoid()
        routed = best_of(score_NE, asked, score_NE.detach() + asked.own[_BIAS].detach())
        return routed._replace(shares=score_NE / score_NE.sum(-1, keepdim=True))

    def settle(self, own: Mapping[str, Tensor], load_E: Tensor) -> None:
        """A step has ended in which so many tokens chose each expert; changes the biases."""
        bias_E = own[_BIAS]
        error_E = load_E.mean() - load_E
        bias_E.add_(error_E.sign().to(bias_E), alpha=self.bias_rate)
