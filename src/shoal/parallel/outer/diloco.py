"""DiLoCo: the workers' average change is the gradient of an outer Nesterov momentum.

Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.parallel.outer.averaging import Averaging

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.outer.rule import Rule, Segments


@part
class DiLoCo(Averaging):
    """Long rounds with an outer Nesterov update, no overlap; choose it for least communication.

    Args:
        tau: optimizer steps of a round; auto is the smallest number that would hide the all-reduce,
            by the plan's estimate, and at most 48.
        outer_lr: learning rate of the outer update.
        outer_momentum: momentum of the outer update.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"local_updates"})
    tau: Annotated[int, Ge(1)] | Literal["auto"] = 48
    outer_lr: Annotated[float, Gt(0)] = 0.7
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9

    momentum: ClassVar[bool] = True

    def rule(self, like: Tensor, segments: Segments) -> Rule:
        """Nesterov's momentum on the mean."""
        return _Nesterov(like, self.outer_lr, self.outer_momentum)


class _Nesterov:
    """``m = beta m + mean``; the direction is ``mean + beta m``."""

    def __init__(self, like: Tensor, lr: float, beta: float) -> None:
        self.lr, self._beta = lr, beta
        self._m = like.new_zeros(like.shape)

    def direction(self, mean: Tensor) -> Tensor:
        self._m.mul_(self._beta).add_(mean)
        return mean.add_(self._m, alpha=self._beta)

    def state(self) -> dict[str, Tensor]:
        return {"momentum": self._m}
