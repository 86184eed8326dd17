"""Tokens that were likely for several iterations are believed sooner.

Each place keeps a credit for each token. In every iteration all credits decay, and the best token
of a masked place earns some; scores are raised by the logarithm of the credit before the
threshold is asked.

Source: Ma et al., dInfer, 2025, section 4.2 (credit decoding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.serve.decode.diffusion.unmask.common import best_place, guesses

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


@part
class Credit:
    """Threshold on logits plus credit, l + alpha log(1 + C), with C <- beta C + p_best ** gamma.

    Args:
        alpha: weight of the credit; 0 is the plain threshold.
        gamma: exponent of the probability in the credit; a smaller value credits improbable tokens
            more.
        beta: decay of the credit per iteration.
        tau: the threshold, in (0, 1].
    """

    alpha: Annotated[float, Ge(0)] = 0.7
    gamma: Annotated[float, Ge(0)] = 0.2
    beta: Annotated[float, Ge(0), Le(1)] = 0.8
    tau: Annotated[float, Gt(0), Le(1)] = 0.9

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        import torch

        if state.memory is None:
            state.memory = torch.zeros_like(logits_BWV)
        credit_BWV = state.memory.mul_(self.beta)
        sure_BW1, best_BW1 = logits_BWV.softmax(-1).max(-1, keepdim=True)
        earned_BW1 = sure_BW1.pow(self.gamma) * masked_BW[..., None]
        credit_BWV.scatter_add_(-1, best_BW1, earned_BW1)
        fused_BWV = logits_BWV + self.alpha * credit_BWV.log1p()
        token_BW, sure_BW = guesses(fused_BWV, masked_BW, state)
        chosen_BW = (sure_BW >= state.bar(self.tau)[:, None]) & masked_BW
        return token_BW, chosen_BW | best_place(sure_BW, masked_BW)
