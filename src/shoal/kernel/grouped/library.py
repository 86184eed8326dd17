"""PyTorch's own grouped product: the loop over experts without Python, CUTLASS on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import BYTES
from shoal.kernel.grouped.base import GroupedKernel
from shoal.kernel.grouped.call import GroupedLinear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# It wants rows of matrices at addresses that are multiples of this.
_BYTES = 16


@part
class LibraryGroupedLinear(GroupedKernel):
    """``torch.nn.functional.grouped_mm`` of recent versions of PyTorch."""

    backend: ClassVar[str] = "torch"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    launch_s: ClassVar[float] = 6e-6

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch.nn.functional as F

        if not len(rows_MK):
            return rows_MK.new_empty(0, weight_ENK.shape[1])
        ends_E = _ends(counts, rows_MK.device)
        turned_EKN = weight_ENK.transpose(1, 2)
        if turned_EKN.is_contiguous():
            turned_EKN = _aligned(turned_EKN)
        else:
            turned_EKN = _aligned(weight_ENK).transpose(1, 2)
        return F.grouped_mm(_aligned(rows_MK), turned_EKN, offs=ends_E)

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch.nn.functional as F

        if not len(rows_MK):
            return rows_MK.new_zeros(len(counts), grad_MN.shape[1], rows_MK.shape[1])
        ends_E = _ends(counts, rows_MK.device)
        return F.grouped_mm(_aligned(grad_MN).T, _aligned(rows_MK), offs=ends_E)

    def _refuses(self, call: GroupedLinear) -> str | None:
        import torch.nn.functional as F

        if not hasattr(F, "grouped_mm"):
            return "needs torch.nn.functional.grouped_mm, which this version of PyTorch lacks"
        if call.device == "cuda" and call.dtype != "bf16":
            return "takes bf16 alone on a GPU"
        size = BYTES[call.dtype]
        if call.n * size % _BYTES or call.k * size % _BYTES:
            return f"takes rows of a multiple of {_BYTES} bytes"
        return None


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Where the rows of each expert end.

    One operator each time, and nothing kept: as in :mod:`shoal.kernel.grouped.padded`.
    """
    import torch

    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _BYTES == 0 else x.clone()
