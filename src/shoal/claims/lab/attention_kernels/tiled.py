"""Own block-sparse attention: tiles in which nothing is seen are never computed.

For each block of queries the keys of its seen tiles are brought together; a softmax over
them needs no correction. The backward pass computes the weights again, so nothing of the
size of the scores is kept.

Source: Dao et al., FlashAttention, 2022 (block-sparse form); Child et al., Sparse
Transformers, 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.claims.lab.attention_kernels.base import AttentionKernel, Prepared
from shoal.claims.lab.attention_kernels.blocks import block_table
from shoal.core.parts import part
from shoal.ir.mask import Mask

if TYPE_CHECKING:
    import torch


@part
class Tiled(AttentionKernel):
    """Matrix products over the unmasked tiles of each block of queries; any mask.

    Args:
        block: edge of a tile.
    """

    block: Annotated[int, Ge(1)] = 128

    name: ClassVar[str] = "tiled"

    def cells(self, mask: Mask) -> int:
        """Cells of the tiles in which something is seen."""
        seen = block_table(mask, self.block) > 0
        heights, widths = (
            [min(self.block, size - at) for at in range(0, size, self.block)]
            for size in (mask.num_queries, mask.num_keys)
        )
        return int(heights @ seen @ widths)

    def held_bytes(self, mask: Mask, heads: int) -> int:
        """The cells of mixed tiles, and the scores of a row of tiles."""
        mixed = int((block_table(mask, self.block) == 1).sum()) * self.block**2
        return mixed + 16 * heads * self.block * mask.num_keys

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        from shoal.claims.lab.attention_kernels.tiled_run import tiled_attention

        return tiled_attention(mask, self.block, device)
