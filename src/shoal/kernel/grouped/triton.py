"""All experts' tiles in one launch on a GPU, in Triton."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.grouped.base import GroupedKernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@part
class TritonGroupedLinear(TritonKernel, GroupedKernel):
    """One program per tile of an expert's rows and outputs; without padding in memory.

    A table, computed from the counts, assigns rows to programs. The gradient of the rows uses the
    same program with the strides of the matrices exchanged; that of the matrices sums over an
    expert's rows in a fixed order.

    Args:
        block_n: outputs per program.
        block_k: inputs per load; for the gradient of the matrices, inputs per program.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")

    block_n: int = 64
    block_k: int = 64

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        from shoal.kernel.grouped.triton_code import product

        rows_MK, (_, n, k) = rows_MK.contiguous(), weight_ENK.shape
        out = rows_MK.new_empty(len(rows_MK), n)
        if not out.numel():
            return out
        block_m = _block(counts)
        tile_T3 = _tiles(counts, block_m, rows_MK.device)
        # Triton's interpreter does not multiply bf16.
        product[(len(tile_T3), -(-n // self.block_n))](
            rows_MK, weight_ENK, out, tile_T3, n, k, *weight_ENK.stride(),
            not rows_MK.is_cuda, block_m, self.block_n, self.block_k,
        )  # fmt: skip
        return out

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        from shoal.kernel.grouped.triton_code import gradient

        grad_MN, rows_MK = grad_MN.contiguous(), rows_MK.contiguous()
        n, k = grad_MN.shape[1], rows_MK.shape[1]
        out = rows_MK.new_empty(len(counts), n, k)
        grid = (len(counts), -(-n // self.block_n), -(-k // self.block_k))
        if out.numel():
            gradient[grid](
                grad_MN, rows_MK, out, _ends(counts, rows_MK.device), n, k,
                not rows_MK.is_cuda, _block(counts), self.block_n, self.block_k,
            )  # fmt: skip
        return out


def _block(counts: Sequence[int]) -> int:
    """Rows of a tile: what an expert that has some has of them, between 16 and 64."""
    busy = len(counts) - list(counts).count(0)
    mean = sum(counts) // max(1, busy)
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def _tiles(counts: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """[T, 3] expert, first row, end of the expert's rows."""
    import torch

    result, start = [], 0
    for expert, count in enumerate(counts):
        stop = start + count
        result += [(expert, first, stop) for first in range(start, stop, rows)]
        start = stop
    return torch.tensor(result, dtype=torch.int32, device=device)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """[E + 1] where each expert's rows begin, and the end."""
    import torch

    ends = itertools.accumulate(counts, initial=0)
    return torch.tensor(list(ends), dtype=torch.int32, device=device)
