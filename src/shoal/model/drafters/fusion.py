"""A gate that mixes the target's feature with the next token, and a few layers like the target's.

``u = W_1 f``, ``v = SiLU(W_2 e)``, ``z = sigmoid(W_z [u; v])``; the layers read ``z u + (1 - z) v``
and give the feature of the next place, of which the target's head makes a token.

Source: Zhang et al., Dovetail, 2025, section 3.2 (dynamic gating fusion).
Shapes: B sequences, T places, D hidden, S places seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.attention import KVCache
from shoal.model.config import ModelConfig
from shoal.model.rope import frequencies, tables_at
from shoal.model.transformer import TransformerBlock


class FusionDrafter(nn.Module):
    """Gate and layers; embedding and head are the target's own. One feature a pass, k = 1."""

    def __init__(self, config: ModelConfig, layers: int) -> None:
        super().__init__()
        self.k = 1
        self.config = config.model_copy(update={"num_layers": layers})
        width = config.hidden
        self.feature = nn.Linear(width, width, bias=False)
        self.embedding = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(2 * width, width)
        self.blocks = nn.ModuleList(TransformerBlock(self.config, layer) for layer in range(layers))

    def cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for the layers."""
        return KVCache(self.config, batch, capacity, dtype=dtype)

    def mixed(
        self,
        features_BTD: Tensor,
        embeds_BTD: Tensor,
        state: None = None,
        *,
        z: float | None = None,
    ) -> tuple[Tensor, None]:
        """What the layers read [B, T, D]; places are mixed one by one, so no state is handed on.

        Args:
            features_BTD: f_i.
            embeds_BTD: of the token at i + 1.
            state: none.
            z: in the place of the gate: 1 takes the feature alone, 0 the token alone.
        """
        u = self.feature(features_BTD)
        v = F.silu(self.embedding(embeds_BTD))
        share = torch.sigmoid(self.gate(torch.cat((u, v), -1))) if z is None else z
        return share * u + (1 - share) * v, None

    def seen(
        self,
        x_BTD: Tensor,
        position_T: Tensor,
        mask: Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The features one place further, [B, T, D].

        Args:
            x_BTD: what :meth:`mixed` gave.
            position_T: of the places.
            mask: additive, broadcastable to [B, 1, T, S]; None is causal.
            cache: keys and values of places before, appended to.
        """
        cos, sin = tables_at(position_T.float(), *frequencies(self.config, 1), x_BTD.dtype)
        mask = None if mask is None else mask.to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin, mask, cache)
        if cache is not None:
            cache.length += x_BTD.shape[1]
        return x_BTD

    def forward(self, features_BTD: Tensor, embeds_BTD: Tensor, *, shift: int = 0) -> Tensor:
        """The features one place further of every place, from the true ones: a training pass."""
        x_BTD, _ = self.mixed(features_BTD, embeds_BTD)
        return self.seen(x_BTD, torch.arange(x_BTD.shape[1]), None)
