"""Boxes of runs and of parts, for the patterns."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.checkpoint.universal.protocols import Shape
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError
from shoal.parallel.tensor.slices import Slices


def run_box(shape: Shape, dim: int, start: int, extent: int) -> Box:
    """The box of ``extent`` rows from ``start`` along ``dim``."""
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = start, extent
    return Box(tuple(offset), tuple(size))


def run(shape: Shape, dim: int, start: int, extent: int) -> Slices:
    """Rows ``start`` to ``start + extent`` along ``dim``; those beyond the tensor are padding."""
    first = min(start, shape[dim])
    held = min(start + extent, shape[dim]) - first
    return Slices(shape, (run_box(shape, dim, first, held),), dim, padding=extent - held)


def parts_of(shape: Shape, dim: int, parts: Sequence[int], ranks: int, rank: int) -> Slices:
    """This rank's share of every part, behind each other."""
    boxes, start = [], 0
    for extent in parts:
        share = extent // ranks
        boxes.append(run_box(shape, dim, start + rank * share, share))
        start += extent
    return Slices(shape, tuple(boxes), dim)


def others_equal(name: str, local: Sequence[Shape], dim: int) -> None:
    """Refuse fragments that differ beside the dimension along which they are put together.

    Raises:
        CheckpointError: they do, or they have no such dimension.
    """
    first = local[0]
    if dim >= len(first):
        raise CheckpointError(
            f"{name}: its pattern names dim {dim} and its fragments have the shape {list(first)}; "
            "correct the pattern"
        )
    for shape in local:
        if (*shape[:dim], *shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]):
            raise CheckpointError(
                f"{name}: fragments of {list(first)} and {list(shape)} cannot be put together "
                f"along dim {dim}; the pattern or a rank is of another model"
            )
