"""A mask is a mask until it is text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class Hard:
    """The embedding of the mask, and unchanged thresholds."""

    @property
    def smooths(self) -> bool:
        """See :class:`~shoal.serve.decode.diffusion.protocols.Iteration`."""
        return False

    def inputs(
        self, masks_BWD: Tensor, last_BWV: Tensor, embedding_VD: Tensor, step_B: Tensor
    ) -> Tensor:
        return masks_BWD

    def bar(self, threshold: float, step_B: Tensor) -> Tensor:
        import torch

        return torch.full(step_B.shape, threshold, dtype=torch.float64, device=step_B.device)
