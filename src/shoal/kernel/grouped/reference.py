"""The meaning of ``grouped_linear``: every row with a copy of its expert's matrix, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.grouped.base import GroupedKernel

if TYPE_CHECKING:
    from torch import Tensor


@part
class ReferenceGroupedLinear(GroupedKernel):
    """Plain torch in fp32 (fp64 for fp64), rounded once at the end; slow."""

    backend: ClassVar[str] = "reference"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    rate: ClassVar[str | None] = "fp32"
    memory_share: ClassVar[float] = 0.02
    compute_share: ClassVar[float] = 0.02

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        wide = torch.promote_types(rows_MK.dtype, torch.float32)
        expert_M = _experts(counts, rows_MK)
        every = weight_ENK.to(wide)[expert_M]
        return torch.einsum("mnk,mk->mn", every, rows_MK.to(wide)).to(rows_MK.dtype)

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        wide = torch.promote_types(rows_MK.dtype, torch.float32)
        outer_MNK = grad_MN.to(wide)[:, :, None] * rows_MK.to(wide)[:, None, :]
        total = outer_MNK.new_zeros(len(counts), *outer_MNK.shape[1:])
        return total.index_add(0, _experts(counts, rows_MK), outer_MNK).to(rows_MK.dtype)


def _experts(counts: Sequence[int], rows: Tensor) -> Tensor:
    """Of each row its expert."""
    import torch

    count_E = torch.tensor(counts, dtype=torch.long, device=rows.device)
    return torch.arange(len(counts), device=rows.device).repeat_interleave(count_E)
