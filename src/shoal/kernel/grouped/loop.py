"""A product after the other, one for each expert that has rows: the peer, and exact in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.grouped.base import GroupedKernel

if TYPE_CHECKING:
    from torch import Tensor


@part
class Loop(GroupedKernel):
    """``torch.mm`` into the rows of the result; experts without rows cost nothing."""

    backend: ClassVar[str] = "loop"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    launch_s: ClassVar[float] = 1e-5

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        out = rows_MK.new_empty(len(rows_MK), weight_ENK.shape[1])
        for expert, mine in _groups(counts):
            torch.mm(rows_MK[mine], weight_ENK[expert].T, out=out[mine])
        return out

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        shape = len(counts), grad_MN.shape[1], rows_MK.shape[1]
        total = rows_MK.new_zeros(shape) if 0 in counts else rows_MK.new_empty(shape)
        for expert, mine in _groups(counts):
            torch.mm(grad_MN[mine].T, rows_MK[mine], out=total[expert])
        return total


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
