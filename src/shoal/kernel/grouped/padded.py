"""One batched product over all experts, each with as many rows as that which has most."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.ir import Estimate, Machine
from shoal.kernel.grouped.base import GroupedKernel
from shoal.kernel.grouped.call import GroupedLinear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Padded"]


@part
class Padded(GroupedKernel):
    """``torch.bmm``: pays where a product of its own costs more than the rows that are added.

    oneDNN takes a small bf16 matrix some 15 us, whatever its size; one product of all of them has
    that once. Nothing is copied where all experts have as many rows.
    """

    backend: ClassVar[str] = "padded"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    launch_s: ClassVar[float] = 0.0
    call_s: ClassVar[float] = 3e-5

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        """See :class:`~shoal.kernel.grouped.base.GroupedKernel`."""
        import torch

        rows_EmK, place_M = _spread(rows_MK, counts)
        every = torch.bmm(rows_EmK, weight_ENK.transpose(1, 2)).view(-1, weight_ENK.shape[1])
        return every if place_M is None else every[place_M]

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        """See :class:`~shoal.kernel.grouped.base.GroupedKernel`."""
        import torch

        (grad_EmN, _), (rows_EmK, _) = _spread(grad_MN, counts), _spread(rows_MK, counts)
        return torch.bmm(grad_EmN.transpose(1, 2), rows_EmK)

    def estimate(self, call: GroupedLinear, machine: Machine) -> Estimate:
        """Rows that are added cost as much as the others."""
        whole = GroupedLinear(
            call.padded, call.experts, call.n, call.k, dtype=call.dtype, device=call.device
        )
        return super().estimate(whole, machine).model_copy(update={"flops": call.flops})


def _spread(x_MI: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """[E, most, I], zero where an expert has fewer; and where each row is, if not where it was."""
    most = max(counts)
    if len(x_MI) == len(counts) * most:
        return x_MI.reshape(len(counts), most, x_MI.shape[1]), None
    place_M = _places(tuple(counts), x_MI.device)
    whole = x_MI.new_zeros(len(counts) * most, x_MI.shape[1]).index_copy_(0, place_M, x_MI)
    return whole.view(len(counts), most, x_MI.shape[1]), place_M


@functools.lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each row is among those of all experts; asked for six times a layer and step."""
    import torch

    with torch.inference_mode(False):
        count_E = torch.tensor(counts)
        ahead_E = torch.arange(len(counts)) * max(counts) - (count_E.cumsum(0) - count_E)
        return (torch.arange(sum(counts)) + ahead_E.repeat_interleave(count_E)).to(device)
