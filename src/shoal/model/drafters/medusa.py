"""Heads on the last hidden state, each of which guesses one place further ahead.

Head k of K (k = 1..K) says which token stands k + 1 places after the input at which the hidden
state was taken; the target's own head says which stands one place after it.

Source: Cai et al., Medusa, 2024, equation 1.
Shapes: N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MedusaHead(nn.Module):
    """``W2 (h + SiLU(W1 h + b))``, initially W1 zero and W2 the target's output matrix."""

    def __init__(self, hidden: int, vocab_size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, vocab_size, bias=False)

    def states(self, hidden_ND: Tensor) -> Tensor:
        """What the output matrix reads, [N, D]."""
        return hidden_ND + F.silu(self.mix(hidden_ND))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]."""
        logits: Tensor = self.out(self.states(hidden_ND))
        return logits


class MedusaHeads(nn.Module):
    """All heads of a target."""

    def __init__(self, num_heads: int, hidden: int, vocab_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(MedusaHead(hidden, vocab_size) for _ in range(num_heads))

    @classmethod
    def of(cls, output_VD: Tensor, num_heads: int) -> MedusaHeads:
        """Fresh heads, each of which says what the target's own head says."""
        made = cls(num_heads, output_VD.shape[1], output_VD.shape[0])
        with torch.no_grad():
            for head in made.heads:
                assert isinstance(head, MedusaHead)
                head.mix.weight.zero_()
                assert head.mix.bias is not None
                head.mix.bias.zero_()
                head.out.weight.copy_(output_VD)
        return made.to(output_VD.dtype)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits [K, N, V] for the tokens 2, 3, ..., K + 1 places after each input."""
        return torch.stack([head(hidden_ND) for head in self.heads])
