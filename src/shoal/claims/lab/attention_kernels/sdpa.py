"""PyTorch's ``scaled_dot_product_attention``, which chooses its own kernel.

Without a mask, or causal, it receives a flag; any other mask is given to it as a tensor, and then
every score is computed.
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
class SDPA(AttentionKernel):
    """``scaled_dot_product_attention``: causal by a flag, other masks as a bool tensor."""

    name: ClassVar[str] = "sdpa"

    def cells(self, mask: Mask) -> int:
        """Seen cells of a causal mask, else all of them."""
        return mask.area() if mask.is_causal else mask.num_queries * mask.num_keys

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch.nn.functional as F

        from shoal.claims.lab.attention_kernels.dense import DenseMask

        if mask.is_causal or mask.kind() == "everything":
            causal = mask.is_causal

            def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                grouped = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

            return plain
        dense = DenseMask(mask, device)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense.cells, enable_gqa=grouped)
            return dense.cleared(out)

        return run
