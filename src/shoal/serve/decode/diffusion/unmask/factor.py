"""As many tokens as their joint doubt allows.

Source: Wu et al., Fast-dLLM, 2025, section 3.3 (factor-based decoding, theorem 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from shoal.core.parts import part
from shoal.serve.decode.diffusion.unmask.common import best_place, guesses

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


@part
class Factor:
    """Unmask the n most probable tokens, for the largest n with (n + 1)(1 - c_n) < f; n >= 1.

    c_n is the probability of the n-th of them. The more tokens are taken at once, the more probable
    each must be, so that the product of their probabilities approximates the joint probability.

    Args:
        f: the bound; a larger value unmasks more tokens per iteration.
    """

    f: Annotated[float, Gt(0)] = 1.0

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        import torch

        token_BW, sure_BW = guesses(logits_BWV, masked_BW, state)
        sorted_BW, place_BW = sure_BW.sort(dim=1, descending=True, stable=True)
        n_W = torch.arange(1, sure_BW.shape[1] + 1, device=sure_BW.device)
        fits_BW = ((n_W + 1) * (1 - sorted_BW) < self.f) & (sorted_BW >= 0)
        most_B1 = (fits_BW * n_W).amax(1, keepdim=True)
        order_BW = place_BW.argsort(1)
        chosen_BW = (order_BW < most_B1) & masked_BW
        return token_BW, chosen_BW | best_place(sure_BW, masked_BW)
