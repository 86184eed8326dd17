"""One expert for each token.

Source: Fedus et al., Switch Transformers, 2022, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.model.gates.base import BaseGate, best_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult


@part
class Switch(BaseGate):
    """Top-1 routing, weighted by the probability, which gives the router a gradient.

    Requires ``top_k`` 1; use it with a ``capacity_factor`` of 1 to 2 and ``aux_loss`` 0.01.
    """

    top: ClassVar[int | None] = 1

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        return best_of(logits_NE.softmax(-1), asked._replace(normalise=False))
