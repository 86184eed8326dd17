"""Experts choose tokens.

Source: Zhou et al., Mixture-of-Experts with Expert Choice Routing, 2022, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.model.gates.base import BaseGate

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult


@part
class ExpertChoice(BaseGate):
    """Every expert takes equally many tokens of a sequence, those with the highest scores.

    A token has ``top_k`` experts on average (times ``capacity_factor``, if given): some tokens have
    more, some none. Loads are equal by construction. The selection depends on later tokens, so such
    a model scores whole sequences and cannot decode.
    """

    decodes: ClassVar[bool] = False

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        import torch

        from shoal.model.routing import RoutingResult

        share_NE = logits_NE.softmax(-1)
        expert_NE = torch.arange(share_NE.shape[1], device=share_NE.device).expand(share_NE.shape)
        keep_NE = asked.keep(share_NE.detach(), expert_NE)
        return RoutingResult(share_NE, expert_NE, share_NE, share_NE, keep_NE)
