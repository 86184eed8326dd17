"""Sums of squares whose value does not depend on how a gradient is cut.

On CPUs PyTorch's norm of a long fp32 vector adds one element after the other and is off by
some 1e-4 at four million elements. That is more than rounding: runs that hold the same
gradient in other pieces would clip it by another factor, and drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Elements whose squares are added in their own type; beyond, sums are added in fp64.
ROW = 2**14


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of the squares of all elements, a scalar in fp64."""
    total: Tensor = row_norms(x).square().sum()
    return total


def row_norms(x: Tensor) -> Tensor:
    """Norms of the rows of :data:`ROW` elements in which ``x`` lies, the last one shorter, fp64."""
    import torch

    flat = x.detach().reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    if whole < flat.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).view(1)])
    row_norms: Tensor = rows.double()
    return row_norms
