"""Sums of squares whose value does not depend on how a gradient is cut.

On CPUs PyTorch's norm of a long fp32 vector adds one element after the other and is off by
some 1e-4 at four million elements. That is more than rounding: runs that hold the same
gradient in other pieces would clip it by another factor, and drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sum_of_squares"]

# Elements whose squares are added in their own type; beyond, sums are added in fp64.
_ROW = 2**14


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of the squares of all elements, a scalar in fp64."""
    import torch

    flat = x.detach().reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total
