"""Sets of vectors, one after the other: checks, orders, and reductions of all sets at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from shoal.fields.graph.gnn.protocols import GnnError

_REDUCED = Literal["sum", "mean", "max"]


def check_segments(x: Tensor, ptr: Tensor, width: int | None = None) -> None:
    """Refuse a pointer or rows that do not fit.

    Args:
        x: [n, width].
        ptr: int64 [S + 1].
        width: of a row; None for any.

    Raises:
        GnnError: they do not; names the value.
    """
    if x.ndim != 2:
        raise GnnError(f"x: {list(x.shape)}; expected [n, width]")
    if width is not None and x.shape[1] != width:
        raise GnnError(f"x: rows of {x.shape[1]} numbers; the operator has a width of {width}")
    if ptr.ndim != 1 or not len(ptr) or ptr.dtype != torch.int64:
        raise GnnError(f"ptr: {ptr.dtype} {list(ptr.shape)}; expected int64 [S + 1]")
    sizes = ptr.diff()
    if len(sizes) and int(sizes.min()) < 0:
        at = int(sizes.argmin())
        raise GnnError(
            f"ptr[{at + 1}] = {int(ptr[at + 1])} after {int(ptr[at])}: expected ascending"
        )
    if int(ptr[0]) or int(ptr[-1]) != len(x):
        raise GnnError(
            f"ptr: from {int(ptr[0])} to {int(ptr[-1])}; expected from 0 to {len(x)}, the rows of x"
        )


def owners(ptr: Tensor) -> Tensor:
    """The set of each row, int64 [n]."""
    sizes = ptr.diff()
    return torch.repeat_interleave(torch.arange(len(sizes), device=ptr.device), sizes)


def shuffled(ptr: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A random order of the rows of each set, int64 [n]; sets stay where they are."""
    owner = owners(ptr)
    keys = torch.rand(len(owner), dtype=torch.float64, generator=generator, device=ptr.device)
    return torch.argsort(owner + keys)


def sampled(ptr: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most so many rows of each set, drawn without replacement: their places, and a pointer.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs, 2017.
    """
    order, owner = shuffled(ptr, generator), owners(ptr)
    kept = torch.arange(len(order)) - ptr[owner] < most
    sizes = ptr.diff().clamp(max=most)
    return order[kept], torch.cat([ptr.new_zeros(1), sizes.cumsum(0)])


def reduced(x: Tensor, ptr: Tensor, how: _REDUCED) -> Tensor:
    """Sum, mean or largest number of each column of each set; 0 of an empty one; [S, width]."""
    check_segments(x, ptr)
    if not len(x):
        # An empty matrix has no rows to reduce, and still is what gradients go to.
        return x.new_zeros(len(ptr) - 1, x.shape[1]) + x.sum()
    result = torch.segment_reduce(x, how, offsets=ptr, axis=0, unsafe=True)
    return torch.where((ptr.diff() > 0)[:, None], result, torch.zeros((), dtype=x.dtype))


class SegmentReduction(nn.Module):
    """Sum, mean or maximum of each set: an :class:`Aggregator` without parameters.

    Args:
        how: sum, mean or max.
    """

    def __init__(self, how: _REDUCED) -> None:
        super().__init__()
        self.how: _REDUCED = how

    def forward(self, x: Tensor, ptr: Tensor) -> Tensor:
        """See :class:`Aggregator`."""
        return reduced(x, ptr, self.how)

    def penalty(self) -> Tensor:
        """Nothing is to be learned."""
        return torch.zeros(())
