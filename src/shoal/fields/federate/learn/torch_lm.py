"""The module of ``tiny_lm``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TinyTransformer(nn.Module):
    """Logits [B, T, V] of tokens int64 [B, T], each from those before it.

    Args:
        vocab: V.
        length: most tokens.
        width: of states, D.
        depth: blocks.
        heads: of attention.
    """

    def __init__(self, vocab: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits."""
        length = tokens_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(tokens_BT) + self.position[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.output(self.norm(x))
        return logits
