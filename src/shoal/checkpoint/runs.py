"""Many boxes of one tensor and who owns each, in little space.

Ranks that share a tensor evenly hold boxes that differ by one step: rank r has rows ``r * n`` to
``(r + 1) * n``. Such boxes are kept as one *run*, so what thousands of ranks hold is a few numbers,
and which of them overlap a box is arithmetic and no search. Irregular boxes are runs of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.core.boxes import Box, uncovered

# Up to so many runs plain integers are faster than arrays.
_FEW = 12


class OwnedBox(NamedTuple):
    """A box and its owner.

    Args:
        owner: number of a rank or of a file.
    """

    owner: int
    box: Box


@dataclass(frozen=True, eq=False, slots=True)
class BoxRuns:
    """Boxes of one tensor of D dimensions, as R runs.

    Box i of a run belongs to ``owner + i * step`` and begins at ``offset + i * delta``.

    Args:
        table: int64 [R, 3 + 3 D]; in each row owner, step, count, offset, delta and shape.
        dims: D.
    """

    table: np.ndarray
    dims: int
    _rows: list[list[int]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, owners: np.ndarray, offsets: np.ndarray, shapes: np.ndarray) -> BoxRuns:
        """Compress boxes.

        Args:
            owners: int64 [N], of each box.
            offsets: int64 [N, D], where each begins.
            shapes: int64 [N, D].
        """
        dims = offsets.shape[1]
        by_owner = np.argsort(owners, kind="stable")
        best = _compressed(owners[by_owner], offsets[by_owner], shapes[by_owner])
        if len(best) > _FEW and dims > 1:
            # A grid of ranks is regular along one of its axes only.
            by_place = np.lexsort(offsets.T)
            other = _compressed(owners[by_place], offsets[by_place], shapes[by_place])
            best = min(best, other, key=len)
        return cls(best, dims)

    @classmethod
    def of_boxes(cls, owned: Sequence[OwnedBox], dims: int) -> BoxRuns:
        """The same of single boxes."""
        count = len(owned)
        return cls.of(
            np.array([owner for owner, _ in owned], dtype=np.int64),
            np.array([box.offset for _, box in owned], dtype=np.int64).reshape(count, dims),
            np.array([box.shape for _, box in owned], dtype=np.int64).reshape(count, dims),
        )

    def __len__(self) -> int:
        """How many boxes there are."""
        return int(self.table[:, 2].sum())

    def plain(self) -> list[list[int]]:
        """As JSON has it."""
        values: list[list[int]] = self.table.tolist()
        return values

    @classmethod
    def from_plain(cls, rows: Sequence[Sequence[int]], dims: int) -> BoxRuns:
        """What :meth:`plain` gave.

        Raises:
            ValueError: it is something else.
        """
        if any(len(row) != 3 + 3 * dims for row in rows):
            raise ValueError(f"a run of a tensor of {dims} dimensions has {3 + 3 * dims} numbers")
        try:
            table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + 3 * dims)
        except OverflowError as cause:
            raise ValueError("a number beyond 64 bits") from cause
        return cls(table, dims)

    def flaw(self, shape: tuple[int, ...], owners: int) -> str:
        """Why these cannot be boxes of a tensor that so many owners hold, or an empty text.

        Nothing is allocated for what is claimed before it was compared with ``owners``.
        """
        dims = self.dims
        for row in self.plain():
            owner, step, count = row[:3]
            last = owner + (count - 1) * step
            if count < 1 or step < 1 or not 0 <= owner <= last < owners:
                return f"a run of {count} boxes from owner {owner} on, of {owners} owners"
            offset, delta, size = row[3 : 3 + dims], row[3 + dims : 3 + 2 * dims], row[-dims:]
            size = size if dims else []
            for at in {0, count - 1}:
                box = Box(
                    tuple(a + at * b for a, b in zip(offset, delta, strict=True)), tuple(size)
                )
                if not box.inside(shape):
                    return f"the piece {box} is no box of shape {list(shape)}"
        return ""

    def expanded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Owners [N], offsets [N, D] and shapes [N, D] of all boxes."""
        table, dims = self.table, self.dims
        counts = table[:, 2]
        which = np.repeat(np.arange(len(table)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = table[which]
        owners = rows[:, 0] + number * rows[:, 1]
        offsets = rows[:, 3 : 3 + dims] + number[:, None] * rows[:, 3 + dims : 3 + 2 * dims]
        return owners, offsets, rows[:, 3 + 2 * dims :]

    def owned(self) -> Iterator[OwnedBox]:
        """All boxes."""
        owners, offsets, shapes = (one.tolist() for one in self.expanded())
        for owner, offset, shape in zip(owners, offsets, shapes, strict=True):
            yield OwnedBox(owner, Box(tuple(offset), tuple(shape)))

    def owners(self) -> list[int]:
        """Who owns any of them, in order."""
        owners: list[int] = np.unique(self.expanded()[0]).tolist()
        return owners

    def volume(self) -> int:
        """Elements of all boxes together; copies count again."""
        start = 3 + 2 * self.dims
        return sum(row[2] * math.prod(row[start:]) for row in self.plain())

    def spans(self, box: Box) -> list[tuple[int, int, int]]:
        """Run, first number and one past the last of the boxes that overlap ``box``."""
        if not box.volume:
            return []
        if len(self.table) > _FEW:
            return self._spans_of_many(box)
        if not self._rows:
            self._rows[:] = self.plain()  # at once: several threads may come here
        dims, start, stop = self.dims, box.offset, box.stop
        spans = []
        for number, row in enumerate(self._rows):
            low, high = 0, row[2] - 1
            for dim in range(dims):
                at, delta, size = row[3 + dim], row[3 + dims + dim], row[3 + 2 * dims + dim]
                if not size:
                    high = -1
                elif delta > 0:
                    low = max(low, (start[dim] - size - at) // delta + 1)
                    high = min(high, (stop[dim] - 1 - at) // delta)
                elif delta < 0:
                    low = max(low, (at - stop[dim]) // -delta + 1)
                    high = min(high, (at + size - 1 - start[dim]) // -delta)
                elif at >= stop[dim] or at + size <= start[dim]:
                    high = -1
                if low > high:
                    break
            else:
                spans.append((number, low, high + 1))
        return spans

    def _spans_of_many(self, box: Box) -> list[tuple[int, int, int]]:
        table, dims = self.table, self.dims
        at, delta = table[:, 3 : 3 + dims], table[:, 3 + dims : 3 + 2 * dims]
        size = table[:, 3 + 2 * dims :]
        start, stop = np.array(box.offset, dtype=np.int64), np.array(box.stop, dtype=np.int64)
        near = (size > 0).all(axis=1)
        still = delta == 0
        near &= (~still | ((at < stop) & (at + size > start))).all(axis=1)
        by = np.where(still, 1, np.abs(delta))
        up = delta > 0
        first = np.where(up, start - size - at, at - stop) // by + 1
        last = np.where(up, stop - 1 - at, at + size - 1 - start) // by
        low = np.where(still, 0, first).max(axis=1, initial=0)
        last = np.where(still, table[:, 2:3] - 1, last)
        high = np.minimum(table[:, 2] - 1, last.min(axis=1, initial=2**62))
        (which,) = np.nonzero(near & (low <= high))
        return list(
            zip(which.tolist(), low[which].tolist(), (high[which] + 1).tolist(), strict=True)
        )

    def overlapping(self, box: Box) -> list[OwnedBox]:
        """The boxes that have elements in common with ``box``."""
        return [one for span in self.spans(box) for one in self._boxes(span)]

    def owners_of(self, spans: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
        """Who owns the boxes of some spans, in order."""
        numbers: set[int] = set()
        for run, first, last in spans:
            owner, step = (int(n) for n in self.table[run, :2])
            numbers.update(range(owner + first * step, owner + last * step, step))
        return tuple(sorted(numbers))

    def _boxes(self, span: tuple[int, int, int]) -> Iterator[OwnedBox]:
        run, first, last = span
        dims = self.dims
        row = self._rows[run] if self._rows else self.table[run].tolist()
        shape = tuple(row[3 + 2 * dims :])
        for at in range(first, last):
            offset = tuple(row[3 + dim] + at * row[3 + dims + dim] for dim in range(dims))
            yield OwnedBox(row[0] + at * row[1], Box(offset, shape))

    def missing(self, shape: tuple[int, ...]) -> Box | None:
        """Some elements of a tensor that no box holds; None if the boxes cover it.

        The boxes are boxes of the tensor.
        """
        whole = Box.whole(shape)
        if not whole.volume:
            return None
        _, offsets, sizes = self.expanded()
        full = sizes.all(axis=1)
        offsets, sizes = offsets[full], sizes[full]
        if _flat_cover(shape, offsets, sizes) or _grid_cover(shape, offsets, sizes):
            return None
        boxes = sorted(zip(offsets.tolist(), sizes.tolist(), strict=True))
        left = uncovered(whole, (Box(tuple(a), tuple(b)) for a, b in boxes))
        return left[0] if left else None


def _compressed(owners: np.ndarray, offsets: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """The runs of boxes that follow each other in this order."""
    count, dims = offsets.shape
    steps = np.diff(owners)
    moves = np.diff(offsets, axis=0)
    joined = (steps > 0) & (shapes[1:] == shapes[:-1]).all(axis=1)
    # Whether the box after the next one is as far from the next as that is from this one.
    goes_on = joined[1:] & joined[:-1] & (steps[1:] == steps[:-1])
    goes_on &= (moves[1:] == moves[:-1]).all(axis=1)
    breaks = np.flatnonzero(~goes_on).tolist()
    pairs = joined.tolist()
    rows: list[list[Any]] = []
    at = turn = 0
    while at < count:
        length, step, delta = 1, 1, [0] * dims
        if at < count - 1 and pairs[at]:
            while turn < len(breaks) and breaks[turn] < at:
                turn += 1
            last = (breaks[turn] if turn < len(breaks) else count - 2) + 1
            length, step, delta = last - at + 1, int(steps[at]), moves[at].tolist()
        head = [int(owners[at]), step, length]
        rows.append([*head, *offsets[at].tolist(), *delta, *shapes[at].tolist()])
        at += length
    return np.array(rows, dtype=np.int64).reshape(len(rows), 3 + 3 * dims)


def _flat_cover(shape: tuple[int, ...], offsets: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether boxes are each contiguous in the flat tensor, and cover it."""
    if not len(offsets):
        return False
    if not shape:
        return True
    ones = np.cumprod(sizes == 1, axis=1)
    ends = np.cumprod((sizes == np.array(shape))[:, ::-1], axis=1)[:, ::-1]
    before = np.concatenate([np.ones((len(sizes), 1), dtype=ones.dtype), ones[:, :-1]], axis=1)
    behind = np.concatenate([ends[:, 1:], np.ones((len(sizes), 1), dtype=ends.dtype)], axis=1)
    if not (before & behind).any(axis=1).all():
        return False
    strides = np.array([math.prod(shape[dim + 1 :]) for dim in range(len(shape))], dtype=np.int64)
    starts = offsets @ strides
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reach = np.maximum.accumulate(starts + np.prod(sizes, axis=1)[order])
    return bool(
        starts[0] == 0 and (starts[1:] <= reach[:-1]).all() and reach[-1] == math.prod(shape)
    )


def _grid_cover(shape: tuple[int, ...], offsets: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether boxes are the cells of a grid over the tensor, and each cell is there."""
    cells = 1
    for dim, extent in enumerate(shape):
        bands = np.unique(np.stack([offsets[:, dim], sizes[:, dim]], axis=1), axis=0)
        ends = bands.sum(axis=1)
        if not len(bands) or bands[0, 0] or ends[-1] != extent or (ends[:-1] != bands[1:, 0]).any():
            return False
        cells *= len(bands)
    return cells <= len(offsets) and cells == len(np.unique(offsets, axis=0))
