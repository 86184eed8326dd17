"""The best guesses of Medusa heads, by the kernels that inference takes for the model itself.

The first layers of all heads read the same state: they are one matrix. Their second matrices are
what costs, K times as large as the target's own head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.formats import weight_format
from shoal.model.drafters.medusa import MedusaHead, MedusaHeads
from shoal.model.linear import DispatchedLinear
from shoal.model.lowbit import LowBitLinear


def ready_linear(weight_NK: Tensor, bias_N: Tensor | None, weights: str) -> nn.Module:
    """A layer by the kernels of inference, its weights in this format."""
    if weights == "plain":
        return DispatchedLinear(weight_NK, bias_N)
    return LowBitLinear.from_packed(weight_format(weights).quantize(weight_NK), bias_N)


class FastHeads:
    """Heads prepared for drafting.

    Args:
        width: candidates of each head.
        weights: format of the matrices.
    """

    def __init__(self, heads: MedusaHeads, width: int, weights: str = "plain") -> None:
        self._width = width
        results = [one for one in heads.heads if isinstance(one, MedusaHead)]
        mix = torch.cat([head.mix.weight for head in results])
        bias = torch.cat([head.mix.bias for head in results])
        self._count = len(results)
        self._mix = ready_linear(mix, bias, weights)
        self._out = [ready_linear(head.out.weight, None, weights) for head in results]
        self.nbytes = sum(one.numel() * one.element_size() for one in heads.parameters())

    def __call__(self, hidden: Sequence[Tensor]) -> np.ndarray:
        """Guesses [B, K, W] by the states [D] of B requests, best first."""
        state_BD = hidden[0].unsqueeze(0) if len(hidden) == 1 else torch.stack(tuple(hidden))
        batch, width = state_BD.shape
        mixed_BKD = F.silu(self._mix(state_BD)).view(batch, self._count, width)
        mixed_KBD = (mixed_BKD + state_BD.unsqueeze(1)).transpose(0, 1).contiguous()
        scores_KBV = torch.stack([out(x) for out, x in zip(self._out, mixed_KBD, strict=True)])
        best: np.ndarray = scores_KBV.topk(self._width, -1).indices.transpose(0, 1).numpy()
        return best
