"""Boxes: axis-aligned pieces of a tensor, and what is left when some are taken away.

Which part of a weight a rank holds is a list of boxes, and loading a checkpoint in another
split than it was saved in is nothing but intersecting them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offset[d] <= index[d] < offset[d] + shape[d]`` of a tensor.

    Args:
        offset: first index of each dimension.
        shape: size in each dimension; a box of a scalar has no dimensions.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index of each dimension."""
        return tuple([o + s for o, s in zip(self.offset, self.shape, strict=True)])

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether this is a box of a tensor of ``shape``."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n
            for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """What both boxes have in common, or None if that is nothing."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def subtract(self, other: Box) -> list[Box]:
        """This box without ``other``, as at most two disjoint boxes a dimension."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.volume else []
        left: list[Box] = []
        low, high = list(self.offset), list(self.stop)
        for dim, (start, stop) in enumerate(zip(common.offset, common.stop, strict=True)):
            for first, last in ((low[dim], start), (stop, high[dim])):
                if first < last:
                    offset, end = [*low], [*high]
                    offset[dim], end[dim] = first, last
                    left.append(
                        Box(tuple(offset), tuple(b - a for a, b in zip(offset, end, strict=True)))
                    )
            low[dim], high[dim] = start, stop
        return left

    def slices(self, within: Box) -> tuple[slice, ...]:
        """The index that picks this box out of a tensor that holds ``within``."""
        return tuple(
            slice(o - w, o - w + s)
            for o, s, w in zip(self.offset, self.shape, within.offset, strict=True)
        )

    def __str__(self) -> str:
        return (
            "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"
        )


def uncovered(target: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of ``target`` that no box holds; empty when they cover it."""
    left = [target] if target.volume else []
    for box in boxes:
        left = [rest for part in left for rest in part.subtract(box)]
        if not left:
            break
    return left


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of a tensor laid out row by row, as boxes in that order.

    What a flat buffer holds of a tensor is seldom a box of it. Cut at the dimension in which it
    first spans several rows, it is the end of a row, whole rows, and the start of a row, and both
    ends are cut in the same way: at most ``2 * len(shape) - 1`` boxes, and no cut has fewer.
    Each is contiguous in the flat buffer.

    Args:
        shape: of the whole tensor.
        start: first element, counted row by row.
        stop: one past the last.

    Source: Wan et al., ByteCheckpoint, 2024, section 3.2 (irregular tensors).
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _under(first, flat_boxes(shape[1:], start - first * inner, stop - first * inner))
    boxes: list[Box] = []
    if start % inner:
        boxes += _under(first, flat_boxes(shape[1:], start - first * inner, inner))
        first += 1
    rows = stop // inner
    if rows > first:
        rest = shape[1:]
        boxes.append(Box((first,) + (0,) * len(rest), (rows - first, *rest)))
    if stop % inner:
        boxes += _under(rows, flat_boxes(shape[1:], 0, stop - rows * inner))
    return boxes


def _under(row: int, boxes: list[Box]) -> list[Box]:
    """Boxes of a row as boxes of the whole."""
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]
