"""As many tokens in every iteration, the surest first: the schedule of the reference sampler.

Source: Nie et al., Large Language Diffusion Models (LLaDA), 2025, algorithm 5 (low-confidence
remasking).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.serve.decode.diffusion.unmask.common import guesses

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


@part
class Fixed:
    """Unmask a fixed number of tokens per iteration, so that a block takes ``steps`` iterations.

    Args:
        steps: iterations of a block; the first iterations take the remainder of the division. If
            not given, one iteration per position.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"fixed_iterations"})
    steps: Annotated[int, Ge(1)] | None = None

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        token_BW, sure_BW = guesses(logits_BWV, masked_BW, state)
        steps_B = state.size if self.steps is None else state.size.clamp(max=self.steps)
        count_B = state.size // steps_B + (state.step < state.size % steps_B)
        # The place of each place in the order of confidence; earlier ones first among equals.
        order_BW = sure_BW.argsort(dim=1, descending=True, stable=True).argsort(1)
        return token_BW, (order_BW < count_B[:, None]) & masked_BW
