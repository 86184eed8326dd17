"""Batches: converted, and distributed over ranks by their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed; other objects stay as they are."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, change) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(part, change) for part in batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    return batch


def leaves(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in order."""
    leaves: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return leaves


def row_bounds(rows: int, parts: int, *, ragged: bool) -> list[int]:
    """Where each part begins, and the end: ``parts + 1`` numbers.

    Raises:
        ConfigError: the rows cannot be distributed so.
    """
    if not ragged:
        if rows % parts:
            raise ConfigError(
                f"batch: {rows} rows cannot be distributed evenly over {parts} ranks; return a "
                f"multiple of {parts} rows, give --ragged, or define local_batch(batch, mesh)"
            )
        return [rows * part // parts for part in range(parts + 1)]
    if rows <= parts:
        raise ConfigError(
            f"--ragged: {rows} rows cannot be distributed unevenly over {parts} ranks; return at "
            f"least {parts + 1} rows"
        )
    # About 1 : 2 : 3 ..., one row at least, and what remains for the last.
    weights = parts * (parts + 1) // 2
    sizes = [max(1, rows * (part + 1) // weights) for part in range(parts - 1)]
    sizes.append(rows - sum(sizes))
    return [sum(sizes[:part]) for part in range(parts + 1)]


def split_rows(batch: Any, part: int, parts: int, *, ragged: bool) -> Any:
    """One part of the rows: of dimension 0 of every tensor that has as many as the first.

    Raises:
        ConfigError: there are no rows, or they cannot be distributed.
    """
    tensors = [x for x in leaves(batch) if x.dim()]
    if not tensors:
        raise ConfigError(
            "batch: has no tensors to distribute; return tensors, also in tuples, lists or "
            "dictionaries, or define local_batch(batch, mesh)"
        )
    rows = tensors[0].shape[0]
    bounds = row_bounds(rows, parts, ragged=ragged)

    def take(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        return tensor[bounds[part] : bounds[part + 1]]

    return map_tensors(batch, take)


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating-point and complex numbers in this precision; others unchanged."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor
