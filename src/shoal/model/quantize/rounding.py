"""Rounding to the nearest code, and how far the largest weights of a group are cut.

Shapes: N outputs, K inputs, G groups of a row, g weights of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernel.formats.base import BaseFormat
from shoal.kernel.protocols import PackedMatrix

# Of the largest magnitude, what is still represented.
SHARES = tuple(1 - step / 50 for step in range(11))


def best_grid(
    fmt: BaseFormat, weight_NGg: Tensor, importance_Gg: Tensor | None = None
) -> dict[str, Tensor]:
    """For each group, the grid among :data:`SHARES` that leaves the least square error.

    Args:
        fmt: the format.
        weight_NGg: fp32.
        importance_Gg: factors on the square errors; all alike if not given.
    """
    best: dict[str, Tensor] = {}
    least_NG = weight_NGg.new_full(weight_NGg.shape[:2], float("inf"))
    for share in SHARES:
        grid = fmt.grid(weight_NGg, share)
        columns = {name: tensor[..., None] for name, tensor in grid.items()}
        error = (fmt.decode(fmt.encode(weight_NGg, columns), columns) - weight_NGg).square_()
        if importance_Gg is not None:
            error *= importance_Gg
        error_NG = error.sum(-1)
        better = error_NG < least_NG
        best = {
            name: torch.where(better, tensor, best[name]) if best else tensor
            for name, tensor in grid.items()
        }
        least_NG = torch.minimum(error_NG, least_NG)
    return best


def rounded(
    fmt: BaseFormat,
    weight_NK: Tensor,
    *,
    importance_K: Tensor | None = None,
    search: bool = False,
) -> PackedMatrix:
    """The nearest codes.

    Args:
        fmt: the format.
        weight_NK: any floating-point type.
        importance_K: of each input, for the search and for which two of four are kept.
        search: cut each group where the error is least.

    Raises:
        KernelError: the format refuses the matrix.
    """
    weight_NGg = fmt.groups(weight_NK)
    group = weight_NGg.shape[-1]
    keep = None
    if fmt.keeps_half:
        flat = weight_NGg.flatten(1)
        keep = fmt.halve(flat if importance_K is None else flat * importance_K.sqrt())
        weight_NGg = weight_NGg * keep.view_as(weight_NGg)
    if search:
        grid = best_grid(
            fmt, weight_NGg, None if importance_K is None else importance_K.view(-1, group)
        )
    else:
        grid = fmt.grid(weight_NGg)
    columns = {name: tensor[..., None] for name, tensor in grid.items()}
    return fmt.pack(fmt.encode(weight_NGg, columns).flatten(1), grid, keep)
