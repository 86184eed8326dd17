"""Top-k of a softmax.

Source: Jiang et al., Mixtral of Experts, 2024, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part
from shoal.model.gates.base import BaseGate, best_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult


@part
class Softmax(BaseGate):
    """The top-k experts by softmax, with weights normalized to a sum of 1, as Mixtral."""

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        return best_of(logits_NE.softmax(-1), asked)
