"""CO2: the average of a round travels during the next one and is applied one round late.

Source: Sun et al., CO2: Efficient Distributed Training with Full Communication-Computation
Overlap, ICLR 2024, algorithm 1 and sections 3.2 (staleness-gap penalty, outer momentum clipping).

Differs: the gap is measured against the largest average change so far, per tensor as a rank holds
it, so the penalty needs no message of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.ir import Machine, Work
from shoal.parallel.outer.averaging import Averaging

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.outer.rule import Rule, Segments

EPS = 1e-12
"""Added to the largest change, which is 0 before anything has changed."""
CONST = 2.0
"""The constant penalty: what the gap's is at most without momentum."""


@part
class CO2(Averaging):
    """Overlap the all-reduce with the next round; choose it where it takes longer than a step.

    Args:
        tau: optimizer steps of a round; auto is the smallest number that hides the all-reduce, by
            the plan's estimate, and at most 48.
        outer_momentum: momentum of the outer update.
        outer_lr: learning rate of the outer update.
        clip: largest element of the input of the outer momentum; None for no clipping.
        penalty: divisor of a stale average: gap, 1 plus the model's change since then over the
            largest average change so far; const, 2; none, 1.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"local_updates"})
    tau: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.2
    outer_lr: Annotated[float, Gt(0)] = 1.0
    clip: Annotated[float, Gt(0)] | None = 1.0
    penalty: Literal["gap", "const", "none"] = "gap"

    delayed: ClassVar[bool] = True
    momentum: ClassVar[bool] = True

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Between nodes or sites."""
        return cls.between_groups(work, machine)

    def rule(self, like: Tensor, segments: Segments) -> Rule:
        """Heavy-ball momentum on the penalised and clipped mean."""
        return _Late(self, like, segments)


class _Late:
    """``m = beta m + clip(mean / penalty)``; the direction is ``m``."""

    def __init__(self, part: CO2, like: Tensor, segments: Segments) -> None:
        self.lr = part.outer_lr
        self._part, self._segments = part, segments
        self._m = like.new_zeros(like.shape)
        self._largest = like.new_zeros(segments.number)

    def direction(self, mean: Tensor) -> Tensor:
        import torch

        part = self._part
        if part.penalty == "gap":
            both = self._segments.norms(mean, self._m)
            torch.maximum(self._largest, both[0], out=self._largest)
            # The last move was the last momentum, times the step.
            gap = 1.0 + part.outer_lr * both[1] / (self._largest + EPS)
            self._segments.divide(mean, gap)
        elif part.penalty == "const":
            mean.div_(CONST)
        if part.clip is not None:
            mean.clamp_(-part.clip, part.clip)
        return self._m.mul_(part.outer_momentum).add_(mean)

    def state(self) -> dict[str, Tensor]:
        return {"momentum": self._m, "largest": self._largest}
