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
    """Every expert takes the tokens of a sequence that score highest, each as many.

    A token has ``top_k`` experts in the mean (times ``capacity_factor``, if one is given): some
    have more, some none. Loads are equal by construction. Who is taken depends on later tokens,
    so such a model scores whole sequences and cannot decode.
    """

    decodes: ClassVar[bool] = False

    def route(self, logits_NE: Tensor, asked: RoutingRequest) -> RoutingResult:
        import torch

        from shoal.model.routing import RoutingResult

        share_NE = logits_NE.softmax(-1)
        expert_NE = torch.arange(share_NE.shape[1], device=share_NE.device).expand(share_NE.shape)
        keep_NE = asked.keep(share_NE.detach(), expert_NE)
        return RoutingResult(share_NE, expert_NE, share_NE, share_NE, keep_NE)
