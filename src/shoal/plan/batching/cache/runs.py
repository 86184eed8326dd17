"""Runs of consecutive blocks: free space that is split when taken and joined when given back.

Free runs never touch each other, so each is as long as it can be. They are found by their
first block, by the block after their last, and by their length.

Source: Shen et al., FastSwitch, 2024, section 4.1 (dynamic block groups); Knowlton, A Fast
Storage Allocator, 1965 (buddies).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from shoal.ir import Copy


def joined(pairs: Iterable[tuple[int, int]]) -> tuple[Copy, ...]:
    """Copies of (source, target) blocks, those that follow each other on both sides in one."""
    copies: list[Copy] = []
    for source, target in pairs:
        last = copies[-1] if copies else None
        if last and (source, target) == (
            last.source + last.num_blocks,
            last.target + last.num_blocks,
        ):
            copies[-1] = last._replace(num_blocks=last.num_blocks + 1)
        else:
            copies.append(Copy(source, target, 1))
    return tuple(copies)


class FreeRuns:
    """Free runs among ``num_blocks`` blocks; all are free at first. Calls cost O(log runs).

    Args:
        num_blocks: blocks there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = 0
        self._count: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        if num_blocks:
            self._insert(0, num_blocks)

    def take(self, most: int, *, roomy: bool = False) -> tuple[int, int]:
        """(first, count) of a run of up to ``most`` blocks; there must be one.

        The shortest run that is long enough, or else the longest there is. ``roomy`` takes from
        the longest in any case, where the run taken has the best chance to be extended.
        """
        place = len(self._by_length) - 1
        if not roomy:
            place = min(place, bisect.bisect_left(self._by_length, (most, -1)))
        count, first = self._by_length[place]
        return first, self.take_at(first, min(most, count))

    def take_at(self, first: int, most: int) -> int:
        """Take up to ``most`` blocks of the run that begins at ``first``; 0 if none does."""
        count = self._count.get(first, 0)
        if not count or not most:
            return 0
        self._remove(first)
        taken = min(most, count)
        if taken < count:
            self._insert(first + taken, count - taken)
        return taken

    def give(self, first: int, count: int) -> None:
        """Blocks are free again; they join the runs that they touch."""
        if count <= 0:
            return
        end = first + count
        if end in self._count:
            end += self._remove(end)
        before = self._first.get(first)
        if before is not None:
            self._remove(before)
            first = before
        self._insert(first, end - first)

    def give_blocks(self, blocks: Iterable[int]) -> None:
        """Give single blocks back, in the fewest runs."""
        for first, _, count in joined((block, block) for block in sorted(blocks)):
            self.give(first, count)

    def blocks(self) -> list[int]:
        """All free blocks, in order."""
        return [
            block
            for first in sorted(self._count)
            for block in range(first, first + self._count[first])
        ]

    def check_integrity(self) -> None:
        """Compare the books with each other; for tests.

        Raises:
            AssertionError: they differ, or two runs touch.
        """
        assert self.total == sum(self._count.values()), "wrong count of free blocks"
        assert sorted((count, first) for first, count in self._count.items()) == self._by_length
        assert {first + count: first for first, count in self._count.items()} == self._first
        assert not set(self._count) & set(self._first), "two free runs touch"

    def _insert(self, first: int, count: int) -> None:
        self._count[first] = count
        self._first[first + count] = first
        bisect.insort(self._by_length, (count, first))
        self.total += count

    def _remove(self, first: int) -> int:
        count = self._count.pop(first)
        del self._first[first + count]
        del self._by_length[bisect.bisect_left(self._by_length, (count, first))]
        self.total -= count
        return count
