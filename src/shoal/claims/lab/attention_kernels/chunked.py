"""Some queries at a time, and everything again in the backward pass.

No more than ``chunk`` rows of scores exist at a time: memory grows with T instead of its
square, for a quarter more products.

Source: Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021; Chen et al.,
Training Deep Nets with Sublinear Memory Cost, 2016 (checkpoints).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.claims.lab.attention_kernels.base import AttentionKernel, Prepared
from shoal.core.parts import part
from shoal.ir.mask import Mask

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@part
class Chunked(AttentionKernel):
    """Batched products over chunks of queries with activation checkpointing; any mask.

    Args:
        chunk: queries of a chunk.
    """

    chunk: Annotated[int, Ge(1)] = 256

    name: ClassVar[str] = "chunked"

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch
        from torch.utils.checkpoint import checkpoint

        from shoal.claims.lab.attention_kernels.dense import (
            DenseMask,
            grouped_scores,
            grouped_values,
        )

        dense = DenseMask(mask, device)
        hidden = ~dense.cells
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def chunk(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
            scores = grouped_scores(q, k).to(wide).masked_fill(rows, float("-inf"))
            return grouped_values(torch.softmax(scores, -1).to(q.dtype), v)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [
                checkpoint(chunk, query, k, v, rows, use_reentrant=False, preserve_rng_state=False)
                for query, rows in zip(
                    torch.split(q, self.chunk, 2), torch.split(hidden, self.chunk, 0), strict=True
                )
            ]
            return dense.cleared(torch.cat(parts, 2))

        return run
