"""What gates have in common: a matrix of scores, and the best K of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import ModelError, require

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.routing import RoutingRequest, RoutingResult


class BaseGate:
    """A gate with one score for each expert."""

    kept: ClassVar[frozenset[str]] = frozenset()
    decodes: ClassVar[bool] = True
    top: ClassVar[int | None] = None
    """The number of experts of a token, where it is no choice."""

    def shapes(self, hidden: int, num_experts: int) -> dict[str, tuple[int, ...]]:
        """Parameters of the router by their names in the layer, the matrix last."""
        return {"router.weight": (num_experts, hidden)}

    def check(self, top_k: int) -> None:
        """Refuse a number of experts that this gate does not send a token to.

        Raises:
            ModelError: names the number.
        """
        require(
            self.top is None or top_k == self.top,
            "top_k",
            top_k,
            expected=f"{self.top} with gate {type(self).__name__.lower()}",
            error=ModelError,
        )

    def scores(self, logits_NR: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Scores [N, E] from tokens times the router's matrix, which here they are."""
        return logits_NR

    def settle(self, own: Mapping[str, Tensor], load_E: Tensor) -> None:
        """A step has ended in which so many tokens chose each expert; nothing is to be changed."""


def best_of(
    probability_NE: Tensor, asked: RoutingRequest, by_NE: Tensor | None = None
) -> RoutingResult:
    """The ``top_k`` experts of each token, by the probability or by something else."""
    import torch

    from shoal.model.routing import RoutingResult

    if by_NE is None:
        score_NK, expert_NK = torch.topk(probability_NE, asked.top_k, dim=-1)
    else:
        expert_NK = torch.topk(by_NE, asked.top_k, dim=-1).indices
        score_NK = probability_NE.gather(1, expert_NK)
    weight_NK = score_NK / score_NK.sum(-1, keepdim=True) if asked.normalise else score_NK
    return RoutingResult(weight_NK, expert_NK, score_NK, probability_NE)
