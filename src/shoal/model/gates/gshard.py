"""Two experts, of which the second comes by chance.

Source: Lepikhin et al., GShard, 2021, algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.model.gates.base import BaseGate, best_of

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult


@part
class GShard(BaseGate):
    """Top-2 routing; in training the second expert is used with probability min(1, 2 g2).

    Requires ``top_k`` 2. g2 is the second expert's share of the weight of both. The draw depends on
    the seed, the step and the token alone.
    """

    top: ClassVar[int | None] = 2

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        import torch

        routed = best_of(logits_NE.softmax(-1), asked._replace(normalise=True))
        if asked.tokens is None or not asked.tokens.training:
            return routed
        second_N = asked.tokens.drawn(asked.layer) < 2 * routed.weights[:, 1].detach()
        return routed._replace(keep=torch.stack([torch.ones_like(second_N), second_N], 1))
