"""PyTorch's tiled kernel for CPUs, called by its own name.

It holds no scores; a mask is added to those of a tile, so every tile is computed whatever the
mask hides.

Source: Dao et al., FlashAttention, 2022.
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
class FlashCPU(AttentionKernel):
    """PyTorch's flash attention for CPUs; masks other than causal are an additive tensor."""

    name: ClassVar[str] = "flash_cpu"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    backward: ClassVar[tuple[str, ...]] = ("cpu",)

    def cells(self, mask: Mask) -> int:
        """Seen cells of a causal mask, else all of them."""
        return mask.area() if mask.is_causal else mask.num_queries * mask.num_keys

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch

        from shoal.claims.lab.attention_kernels.dense import DenseMask

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if mask.is_causal or mask.kind() == "everything":
            causal = mask.is_causal

            def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = kernel(q, k, v, 0.0, causal)[0]
                return out

            return plain
        dense = DenseMask(mask, device)
        added = dense.added(dtype)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense.cleared(kernel(q, k, v, 0.0, False, attn_mask=added)[0])

        return run
