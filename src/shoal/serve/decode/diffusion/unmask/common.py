"""What unmasking policies share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.serve.decode.diffusion.protocols import UnmaskState


def guesses(logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState) -> tuple[Tensor, Tensor]:
    """Tokens [B, W] and how sure the model is of each [B, W]; -1 where nothing is masked."""
    p_BWV = logits_BWV.softmax(-1)
    if state.noise is None:
        sure_BW, token_BW = p_BWV.max(-1)
    else:
        token_BW = (logits_BWV + state.noise).argmax(-1)
        sure_BW = p_BWV.gather(-1, token_BW[..., None])[..., 0]
    return token_BW, sure_BW.masked_fill(~masked_BW, -1.0)


def best_place(sure_BW: Tensor, masked_BW: Tensor) -> Tensor:
    """The first of the surest masked places of each request, bool [B, W]; none if none is left."""
    import torch

    best_BW = torch.zeros_like(masked_BW)
    best_BW.scatter_(1, sure_BW.argmax(1, keepdim=True), True)
    return best_BW & masked_BW
