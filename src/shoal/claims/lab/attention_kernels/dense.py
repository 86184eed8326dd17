"""Masks as tensors, and queries that see nothing.

A softmax over nothing is 0 / 0. Such a query is let see everything and its output is set to
zero, so that its gradients are zero as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.ir.mask import Mask


class DenseMask:
    """A mask as bool [T, S] in which every query sees something.

    Args:
        mask: what is seen.
        device: where the tensors lie.
    """

    def __init__(self, mask: Mask, device: torch.device) -> None:
        cells = torch.from_numpy(mask.dense()).to(device)
        blind = ~cells.any(1)
        self.any_blind = bool(blind.any())
        self.blind = blind.unsqueeze(-1)
        self.cells = cells | self.blind if self.any_blind else cells

    def added(self, dtype: torch.dtype) -> Tensor:
        """The mask to add to scores: 0 where seen, else -inf."""
        out = torch.zeros(self.cells.shape, dtype=dtype, device=self.cells.device)
        return out.masked_fill_(~self.cells, float("-inf"))

    def cleared(self, out: Tensor) -> Tensor:
        """``out`` [B, H, T, d] with zeros for the queries that see nothing."""
        return out.masked_fill(self.blind, 0.0) if self.any_blind else out


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [B, H, T, S] of q [B, H, T, d] and k [B, K, S, d]."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    query = (q * dim**-0.5).reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    scores: Tensor = (query @ k.transpose(-1, -2)).view(batch, heads, rows, k.shape[2])
    return scores


def grouped_values(weights: Tensor, v: Tensor) -> Tensor:
    """Weights [B, H, T, S] times v [B, K, S, d]: [B, H, T, d]."""
    batch, heads, rows, columns = weights.shape
    kv_heads = v.shape[1]
    group = weights.reshape(batch, kv_heads, heads // kv_heads * rows, columns)
    out: Tensor = (group @ v).view(batch, heads, rows, v.shape[-1])
    return out
