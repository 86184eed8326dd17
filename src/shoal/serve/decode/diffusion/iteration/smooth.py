"""What the model thought of a masked place is not thrown away: it sees some of it.

Source: Ma et al., dInfer, 2025, section 4.1 (iteration smoothing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class Smooth:
    """The embedding (1 - w) E[mask] + w softmax(last logits) E, and falling thresholds.

    In iteration t of a block, w = min(weight + growth t, most), and a threshold tau is max(tau,
    bar_from - bar_step t), which is stricter in the first iterations.

    Args:
        weight: initial w.
        growth: increase of w per iteration.
        most: largest w.
        bar_from: initial threshold; 0 leaves thresholds unchanged.
        bar_step: decrease of the threshold per iteration.
    """

    weight: Annotated[float, Ge(0), Le(1)] = 0.15
    growth: Annotated[float, Ge(0), Le(1)] = 0.02
    most: Annotated[float, Ge(0), Le(1)] = 0.3
    bar_from: Annotated[float, Ge(0), Le(1)] = 1.0
    bar_step: Annotated[float, Ge(0), Le(1)] = 0.02

    @property
    def smooths(self) -> bool:
        """See :class:`~shoal.serve.decode.diffusion.protocols.Iteration`."""
        return self.most > 0

    def inputs(
        self, masks_BWD: Tensor, last_BWV: Tensor, embedding_VD: Tensor, step_B: Tensor
    ) -> Tensor:
        weight_B = (self.weight + self.growth * step_B.double()).clamp(max=self.most) * (step_B > 0)
        weight_B11 = weight_B[:, None, None].to(masks_BWD.dtype)
        thought_BWD = last_BWV.softmax(-1).to(embedding_VD.dtype) @ embedding_VD
        return (1 - weight_B11) * masks_BWD + weight_B11 * thought_BWD

    def bar(self, threshold: float, step_B: Tensor) -> Tensor:
        return (self.bar_from - self.bar_step * step_B.double()).clamp(min=threshold)
