"""A place for tensors with a hard budget of bytes.

A :class:`TierAllocator` says which bytes are whose; it knows no memory, so a tier of any kind has
one. :class:`BudgetedTier` puts memory under it: of a GPU, or of the host in the part of a GPU.
Blocks are found by best fit and come back together when they are free again.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.errors import TierFullError, require
from shoal.core.sizes import human_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 256
"""Bytes: blocks of memory begin at a multiple of this, whatever is put there."""


# Of Linux; Python has no name for it before 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class TierBlock:
    """Bytes of a tier that have an owner.

    Args:
        tag: what for, as errors and reports name it.
    """

    start: int
    nbytes: int
    tag: str


@dataclass(slots=True)
class TierStats:
    """What a tier was used for.

    Args:
        used: bytes in use, with what blocks are rounded up to.
        peak: most bytes in use at one time.
        allocations: number of allocated blocks.
        bytes_in: bytes that movers brought.
        bytes_out: bytes that movers took.
    """

    used: int = 0
    peak: int = 0
    allocations: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class TierAllocator:
    """Which bytes of a tier are whose.

    Args:
        name: of the tier, for errors.
        capacity: its bytes.
        alignment: blocks begin and end at multiples of this.
    """

    def __init__(self, name: str, capacity: int, alignment: int = ALIGNMENT) -> None:
        require(capacity >= alignment, f"{name} bytes", capacity, expected=f"at least {alignment}")
        self.name, self.capacity, self.alignment = name, capacity, alignment
        self.stats = TierStats()
        self._holes: list[tuple[int, int]] = [(0, capacity // alignment * alignment)]
        self._owned: dict[int, int] = {}
        self._reserved = 0

    @property
    def room(self) -> int:
        """Bytes that are free; they need not lie together."""
        return self.capacity - self.stats.used

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that could be had."""
        return min(self.room, max((size for _, size in self._holes), default=0))

    def rounded(self, nbytes: int) -> int:
        """Bytes that a block of ``nbytes`` takes."""
        return -(-max(1, nbytes) // self.alignment) * self.alignment

    def alloc(self, nbytes: int, tag: str) -> TierBlock:
        """The smallest hole that is large enough, from its beginning."""
        size = self.rounded(nbytes)
        fits = [(hole, start) for start, hole in self._holes if hole >= size]
        if not fits or size > self.room:
            raise self.full(size, tag)
        hole, start = min(fits)
        index = bisect.bisect_left(self._holes, (start, hole))
        if hole == size:
            del self._holes[index]
        else:
            self._holes[index] = (start + size, hole - size)
        self._owned[start] = size
        self.stats.allocations += 1
        self._add(size)
        return TierBlock(start, nbytes, tag)

    def free(self, block: TierBlock) -> None:
        """Give a block back; neighbours that are free become one hole."""
        size = self._owned.pop(block.start)
        self.stats.used -= size
        start = block.start
        index = bisect.bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            before, length = self._holes.pop(index)
            start, size = before, length + size
        self._holes.insert(index, (start, size))

    def reserve(self, nbytes: int, tag: str) -> None:
        """Count bytes that lie elsewhere against the budget.

        Raises:
            TierFullError: the budget is used up.
        """
        if nbytes > self.room:
            raise self.full(nbytes, tag)
        self._reserved += nbytes
        self._add(nbytes)

    def release(self, nbytes: int) -> None:
        """Count them no more."""
        self._reserved -= nbytes
        self.stats.used -= nbytes

    def _add(self, nbytes: int) -> None:
        self.stats.used += nbytes
        self.stats.peak = max(self.stats.peak, self.stats.used)

    def full(self, need: int, tag: str) -> TierFullError:
        """The error that states what is missing."""
        return TierFullError(
            f"{self.name}: {tag} needs {human_bytes(need)} of {human_bytes(self.capacity)}; "
            f"{human_bytes(self.room)} are free, {human_bytes(self.largest_hole)} of them in one "
            f"piece; give {self.name} at least {human_bytes(self.stats.used + need)}"
        )


class BudgetedTier(TierAllocator):
    """Memory of one device, or of the host, with a budget.

    Args:
        name: device or host.
        capacity: budget in bytes.
        device: where the memory lies.
        alignment: alignment of blocks; disk transfers need whole sectors.
        pinned: pages of the host stay where they are, so that a GPU can copy by itself.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        alignment: int = ALIGNMENT,
        pinned: bool = False,
    ) -> None:
        import torch

        self._pinned = pinned
        super().__init__(name, capacity, alignment)
        self.device = torch.device(device)
        self._first = 0
        self._storage: torch.UntypedStorage | None = None

    @property
    def storage(self) -> torch.UntypedStorage:
        """What all blocks lie in; there is none until a block is looked at."""
        import torch

        if self._storage is None:
            # Pages that are never touched cost nothing; a base that is aligned makes blocks so.
            size = self.capacity + self.alignment
            if self.device.type == "cpu" and not self._pinned:
                # Nor are they promised: a budget may be larger than the memory that is free.
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
                base = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
            else:
                base = torch.empty(
                    size, dtype=torch.uint8, device=self.device, pin_memory=self._pinned
                )
            self._first = -base.data_ptr() % self.alignment
            self._storage = base.untyped_storage()
        return self._storage

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is what the blocks lie in."""
        return self._storage is not None and self._storage._cdata == storage._cdata

    def view(self, block: TierBlock, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A block as a tensor with versions of its own: writing one block spoils no other's."""
        import torch

        count = 1
        strides: list[int] = []
        for size in reversed(shape):
            strides.append(count)
            count *= size
        require(
            count * dtype.itemsize <= block.nbytes,
            block.tag,
            list(shape),
            expected=f"at most {block.nbytes} bytes",
        )
        made = torch.empty(0, dtype=dtype, device=self.device)
        storage = self.storage
        offset = (self._first + block.start) // dtype.itemsize
        return made.set_(storage, offset, tuple(shape), tuple(reversed(strides)))
