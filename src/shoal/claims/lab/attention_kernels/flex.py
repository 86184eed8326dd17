"""PyTorch's FlexAttention: a compiled kernel that skips blocks in which nothing is seen.

On a GPU it becomes a Triton kernel, on a CPU C++; there it has no gradient. Blocks are found
from the typed mask, and what is seen inside a mixed block from a table of cells.

Source: Dong et al., Flex Attention, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shoal.claims.lab.attention_kernels.base import AttentionKernel, Prepared
from shoal.claims.lab.attention_kernels.blocks import block_table
from shoal.core.errors import require
from shoal.core.native import compiler
from shoal.core.parts import part
from shoal.ir.mask import Mask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# One program for each length; torch gives up after eight unless it is set otherwise.
_MAX_PROGRAMS = 4096


@part
class Flex(AttentionKernel):
    """FlexAttention with a block mask; the first call compiles it, which takes seconds.

    Args:
        block: edge of the blocks that are skipped.
    """

    block: int = 128

    name: ClassVar[str] = "flex"
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    backward: ClassVar[tuple[str, ...]] = ("cuda",)
    compiled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            self.block >= 16 and self.block & (self.block - 1) == 0,
            "attention_kernel.flex.block",
            self.block,
            expected="a power of two of at least 16",
        )

    def cells(self, mask: Mask) -> int:
        """Cells of the blocks in which something is seen."""
        return int((block_table(mask, self.block) > 0).sum()) * self.block**2

    def _refuses(self, mask: Mask) -> str | None:
        if mask.num_queries % self.block or mask.num_keys % self.block:
            return f"wants lengths that are multiples of its block of {self.block}"
        if compiler() is None:
            return "needs a C++ compiler; install g++"
        return None

    def _prepare(self, mask: Mask, dtype: torch.dtype, device: torch.device) -> Prepared:
        import torch
        from torch._dynamo import config as dynamo
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        seen = block_table(mask, self.block)
        cells = torch.from_numpy(mask.dense()).to(device)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return cells[query, key]

        def ordered(chosen: np.ndarray) -> tuple[Tensor, Tensor]:
            count = torch.from_numpy(chosen.sum(1).astype(np.int32))
            order = torch.from_numpy(np.argsort(~chosen, 1, kind="stable").astype(np.int32))
            return count[None, None].to(device), order[None, None].to(device)

        blocks = BlockMask.from_kv_blocks(
            *ordered(seen == 1), *ordered(seen == 2), BLOCK_SIZE=self.block, mask_mod=sees
        )
        compiled: Any = torch.compile(flex_attention, dynamic=False)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.shape[1] != k.shape[1]
            with dynamo.patch(
                recompile_limit=_MAX_PROGRAMS, accumulated_recompile_limit=_MAX_PROGRAMS
            ):
                out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)
            return out

        return run
