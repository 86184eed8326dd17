"""Documents one by one, each with a mask that every fast kernel has built in.

Nothing between documents is computed: under a document mask this does the mask-exact work.

Source: Dao, FlashAttention-2, 2023 (its form for sequences of various lengths).
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
class Varlen(AttentionKernel):
    """One call of PyTorch's attention per document, full or causal."""

    name: ClassVar[str] = "varlen"

    def cells(self, mask: Mask) -> int:
        """Exactly the seen ones."""
        return mask.area()

    def held_bytes(self, mask: Mask, heads: int) -> int:
        """Nothing."""
        return 0

    def _refuses(self, mask: Mask) -> str | None:
        squares = all(
            found.kind == "full" or (found.kind == "causal" and found.q1 - found.q0 == keys)
            for found in mask.ranges
            for keys in [found.k1 - found.k0]
        )
        stops = [found.q1 for found in mask.ranges]
        apart = all(
            later.q0 >= stop for later, stop in zip(mask.ranges[1:], stops[:-1], strict=True)
        )
        if mask.blocks or not squares or not apart:
            return "takes documents alone, each full or causal and in one piece"
        return None

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch
        import torch.nn.functional as F

        ranges = mask.ranges

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.shape[1] != k.shape[1]
            parts, stop = [], 0
            for result in ranges:
                if result.q0 > stop:
                    parts.append(torch.zeros_like(q[:, :, stop : result.q0]))
                rows, keys = slice(result.q0, result.q1), slice(result.k0, result.k1)
                parts.append(
                    F.scaled_dot_product_attention(
                        q[:, :, rows],
                        k[:, :, keys],
                        v[:, :, keys],
                        is_causal=result.kind == "causal" and result.q1 - result.q0 > 1,
                        enable_gqa=grouped,
                    )
                )
                stop = result.q1
            if stop < q.shape[2]:
                parts.append(torch.zeros_like(q[:, :, stop:]))
            return torch.cat(parts, 2)

        return run
