"""Attention by the formula: all scores, softmax, a product.

Source: Vaswani et al., Attention Is All You Need, 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.claims.lab.attention_kernels.base import AttentionKernel, Prepared
from shoal.core.parts import part
from shoal.ir.mask import Mask

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@part
class Naive(AttentionKernel):
    """Stores all T x S scores and weights, also for the backward pass; any mask."""

    name: ClassVar[str] = "naive"

    def held_bytes(self, mask: Mask, heads: int) -> int:
        """Scores, weights and their gradients, and the mask."""
        return (1 + 16 * heads) * mask.num_queries * mask.num_keys

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch

        from shoal.claims.lab.attention_kernels.dense import (
            DenseMask,
            grouped_scores,
            grouped_values,
        )

        dense = DenseMask(mask, device)
        hidden = ~dense.cells
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = grouped_scores(q, k).to(wide).masked_fill(hidden, float("-inf"))
            return dense.cleared(grouped_values(torch.softmax(scores, -1).to(q.dtype), v))

        return run
