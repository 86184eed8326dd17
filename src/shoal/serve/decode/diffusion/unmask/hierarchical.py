"""Sure tokens, and one of each run of masks: spans are divided until nothing is left.

Tokens that are found together are far apart then, and depend less on each other.

Source: Ma et al., dInfer, 2025, section 4.2 (hierarchical decoding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.serve.decode.diffusion.unmask.common import best_place, guesses

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


@part
class Hierarchical:
    """Unmask tokens above ``tau``, and the best of each run of masks if above ``low``.

    Args:
        tau: probability above which any token is unmasked, in (0, 1].
        low: probability above which the most probable token of a run is unmasked.
    """

    tau: Annotated[float, Gt(0), Le(1)] = 0.9
    low: float = 0.4

    def __post_init__(self) -> None:
        require(
            0 <= self.low <= self.tau,
            "unmask.hierarchical.low",
            self.low,
            expected=f"0 to tau = {self.tau}",
        )

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        import torch

        token_BW, sure_BW = guesses(logits_BWV, masked_BW, state)
        chosen_BW = (sure_BW > state.bar(self.tau)[:, None]) & masked_BW
        # Runs of masks are numbered from 1 on in each request; 0 is where nothing is masked.
        before_BW = torch.nn.functional.pad(masked_BW[:, :-1], (1, 0))
        run_BW = (masked_BW & ~before_BW).cumsum(1) * masked_BW
        top_BR = sure_BW.new_full((len(sure_BW), sure_BW.shape[1] // 2 + 2), -1.0)
        top_BR.scatter_reduce_(1, run_BW, sure_BW, "amax")
        surest_BW = masked_BW & (sure_BW == top_BR.gather(1, run_BW)) & (sure_BW > self.low)
        # Of equal ones in a run, the first.
        nth_BW = surest_BW.cumsum(1)
        base_BR = torch.full_like(run_BW[:, :1], run_BW.shape[1]).repeat(1, top_BR.shape[1])
        base_BR.scatter_reduce_(1, run_BW, torch.where(surest_BW, nth_BW, run_BW.shape[1]), "amin")
        surest_BW &= nth_BW == base_BR.gather(1, run_BW)
        return token_BW, chosen_BW | surest_BW | best_place(sure_BW, masked_BW)
