"""Cosines in few dimensions.

Source: Chi et al., On the Representation Collapse of Sparse Mixture of Experts, 2022, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from shoal.core.parts import part
from shoal.model.gates.softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS, _TEMPERATURE = "router_experts", "router_temperature"
# Below it a softmax is a choice, and its gradient rounding.
_COLDEST = 0.01


@part
class XMoE(Softmax):
    """Top-k of a softmax over cosines between a projection of the token and expert vectors.

    Routing depends on the direction of a token alone, so that hidden states do not collapse onto
    the experts' vectors. The temperature is learned.

    Args:
        dim: dimensions of the projection; half the number of experts if not given.
    """

    dim: Annotated[int, Gt(0)] | None = None

    def shapes(self, hidden: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Parameters of the router by their names in the layer, the matrix last."""
        dim = self.dim or max(2, num_experts // 2)
        return {
            _EXPERTS: (num_experts, dim),
            _TEMPERATURE: (1,),
            "router.weight": (dim, hidden),
        }

    def scores(self, logits_NR: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Cosines [N, E] over the temperature."""
        from torch.nn.functional import normalize

        experts_ER = own[_EXPERTS].to(logits_NR.dtype)
        cosine_NE = normalize(logits_NR, dim=-1) @ normalize(experts_ER, dim=-1).T
        return cosine_NE / own[_TEMPERATURE].to(logits_NR.dtype).clamp(min=_COLDEST)
