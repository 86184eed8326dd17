"""Every token that the model is sure enough of.

Source: Wu et al., Fast-dLLM, 2025, section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.serve.decode.diffusion.unmask.common import best_place, guesses

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


@part
class Threshold:
    """Unmask all tokens of at least this probability, and always the most probable one.

    Args:
        tau: smallest probability.
    """

    tau: Annotated[float, Gt(0), Le(1)] = 0.9

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        token_BW, sure_BW = guesses(logits_BWV, masked_BW, state)
        chosen_BW = (sure_BW >= state.bar(self.tau)[:, None]) & masked_BW
        return token_BW, chosen_BW | best_place(sure_BW, masked_BW)
