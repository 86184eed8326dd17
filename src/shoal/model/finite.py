"""Weights are finite: a single NaN in a file becomes NaN in every answer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.core.errors import ModelError, ShoalError


def check_finite(value: Tensor, where: str, *, error: type[ShoalError] = ModelError) -> None:
    """Refuse a tensor with NaN or infinity in it.

    It is read once, for its extremes, which nothing that is not finite leaves finite: that takes
    about as long as a copy, a tenth of :func:`torch.isfinite`, and no memory.

    Args:
        value: of any shape and type; integers are finite.
        where: file and name of the tensor, for the error.
        error: class of the error.

    Raises:
        ShoalError: it has; says how many.
    """
    if not value.is_floating_point() or not value.numel():
        return
    if value.dtype.itemsize == 1:  # the extremes of 8-bit floats are not computed
        value = value.float()
    if all(math.isfinite(one) for one in torch.stack(torch.aminmax(value)).tolist()):
        return
    bad = int((~value.isfinite()).sum())
    raise error(
        f"{where}: {bad} of {value.numel()} values are NaN or infinite in "
        f"{str(value.dtype).removeprefix('torch.')}; the file is damaged, was saved after a step "
        "that diverged, or needs a wider precision"
    )
