"""Collectives through memory that the ranks of one host share.

Gloo sends every byte through the kernel's loopback sockets, in and out, by the very
cores that compute. Ranks of one host can instead put their parts into one mapped file:
each rank sums its slice of all parts, in the order of the ranks, and takes the others'
slices from where they were summed. Every rank thus gets the same bits. What a rank
reads of others is what a ring would have sent it, ``2 n (N - 1) / N`` bytes.

A part goes through in chunks that stay in the caches. Two sets of slots take turns, so
that no rank writes where a slower rank still reads: between two uses of a set lies a
barrier of the other one.

Two ranks can also begin a sum and go on: each puts its part where the other finds it, and adds
the other's when it waits. That has slots of its own, so that several are under way at once.

Source: the direct reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.scratch import SHARED_MEMORY, shm_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

_CHUNK = 2 * 2**20  # bytes of a slot: two ranks' slots fit in the caches of a core
_LINE = 64  # bytes of a cache line: counters of different ranks must not share one
# What the line of a rank holds: barriers, its process, sums begun, sums of which it has read.
_COUNT, _PROCESS, _POSTED, _TAKEN = range(4)
_PART = 2**19  # bytes of a part of a sum that begins without waiting
_PARTS = 4  # of those under way at once
_SHAPES = 1024  # whose views are kept
SPINS = 2000  # polls, about 0.2 ms, before a waiting rank gives its core away
NAP_S = 5e-5


class PendingSum:
    """A sum of two ranks that has begun; made by :meth:`SharedMemory.post`."""

    def __init__(self, shared: SharedMemory, number: int, part: Tensor, other: Tensor) -> None:
        self._shared, self.number = shared, number
        self.part, self.other = part, other

    def wait(self) -> None:
        """Return when the sum is there; costs no more than the addition if the other was first.

        Raises:
            RuntimeError: the other rank is gone, or did not come in time.
        """
        self._shared.finish(self.number)


class SharedMemory:
    """One mapped file, open in every rank of the host; see :meth:`join`.

    The file has no name once all have opened it: it is gone with its last rank,
    however that ends.
    """

    def __init__(self, file: int, rank: int, world: int, timeout_s: float) -> None:
        import torch

        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._map = mmap.mmap(file, _size(world))
        # Per rank one line: its counter, then its process number.
        self._lines = np.frombuffer(self._map, np.int64, world * _LINE // 8).reshape(world, -1)
        slots = torch.frombuffer(
            self._map, dtype=torch.uint8, offset=_header(world), count=2 * world * _CHUNK
        )
        self._slots = slots.view(2, world, _CHUNK)
        self._typed: dict[torch.dtype, Tensor] = {torch.uint8: self._slots}
        self._turn = 0
        self._count = 0
        self._under_way: deque[PendingSum] = deque()
        self._posted = 0
        if world == 2:
            begin = _header(world) + slots.nbytes
            parts = torch.frombuffer(
                self._map, dtype=torch.uint8, offset=begin, count=2 * _PARTS * _PART
            )
            self._parts = parts.view(_PARTS, 2, _PART)
            # Views of these; making them takes as long as the sum of a few tokens.
            self._places: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}
        self._lines[rank, _PROCESS] = os.getpid()

    @classmethod
    def join(
        cls, rank: int, world: int, timeout_s: float, group: ProcessGroup | None = None
    ) -> SharedMemory | None:
        """Map one file in all ranks of a process group; None if that cannot be.

        It cannot be across hosts or containers, without a shared memory file system that
        has 4 MiB per rank left, and on processors that may reorder stores.
        Every rank calls it, and every rank gets the same answer.
        """
        file = join_file(rank, world, size=_size(world), reserve=_size(world), group=group)
        if file is None:
            return None
        shared = cls(file, rank, world, timeout_s)
        os.close(file)
        return shared

    def all_reduce(self, x: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        flat = x.view(-1)
        slots = self._of(flat.dtype)
        width = slots.shape[2]
        for start in range(0, flat.numel(), width):
            part = flat[start : start + width]
            count = part.numel()
            at = self._next(slots)
            at[self.rank, :count].copy_(part)
            self.barrier()
            low, high = (count * r // self.world for r in (self.rank, self.rank + 1))
            total = at[0, low:high]
            for other in range(1, self.world):
                total.add_(at[other, low:high])
            self.barrier()
            part.copy_(at[0, :count])

    def post(self, x: Tensor) -> PendingSum | None:
        """Begin to sum a contiguous tensor in place without waiting; None if it cannot be so.

        It can be with two ranks and a tensor of at most 512 KiB. Each rank adds what the other
        has, so both have the same bits. Both begin their sums in the same order.

        Raises:
            RuntimeError: the other rank is gone, or did not come in time.
        """
        if self.world != 2 or x.nbytes > _PART:
            return None
        if len(self._under_way) == _PARTS:
            self.finish(self._under_way[0].number)
        self._posted += 1
        # The other may still read what was in this place.
        self._until(1 - self.rank, _TAKEN, self._posted - _PARTS)
        place = self._posted % _PARTS, x.shape, x.dtype
        if place not in self._places:
            if len(self._places) == _SHAPES:
                self._places.clear()
            self._places[place] = [
                part[: x.nbytes].view(x.dtype).view(x.shape) for part in self._parts[place[0]]
            ]
        both = self._places[place]
        both[self.rank].copy_(x)
        self._lines[self.rank, _POSTED] = self._posted
        posted = PendingSum(self, self._posted, x, both[1 - self.rank])
        self._under_way.append(posted)
        return posted

    def finish(self, number: int) -> None:
        """Make the sums that were begun, up to one of them.

        Raises:
            RuntimeError: the other rank is gone, or did not come in time.
        """
        while self._under_way and self._under_way[0].number <= number:
            first = self._under_way[0]
            self._until(1 - self.rank, _POSTED, first.number)
            first.part.add_(first.other)
            self._lines[self.rank, _TAKEN] = first.number
            self._under_way.popleft()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Every rank's ``x`` [n] into ``out`` [world * n], both contiguous.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        slots = self._of(x.dtype)
        width = slots.shape[2]
        places = out.view(self.world, -1)
        for start in range(0, x.numel(), width):
            part = x[start : start + width]
            count = part.numel()
            at = self._next(slots)
            at[self.rank, :count].copy_(part)
            self.barrier()
            places[:, start : start + count].copy_(at[:, :count])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """This rank's part [n] of the sum of ``x`` [world * n] into ``out``, both contiguous.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        slots = self._of(x.dtype)
        # A slot holds a piece of the part of every rank.
        width = slots.shape[2] // self.world
        parts = x.view(self.world, -1)
        for start in range(0, out.numel(), width):
            total = out[start : start + width]
            count = total.numel()
            at = self._next(slots)[:, : self.world * count].view(self.world, self.world, count)
            at[self.rank].copy_(parts[:, start : start + count])
            self.barrier()
            total.copy_(at[0, self.rank])
            for other in range(1, self.world):
                total.add_(at[other, self.rank])

    def broadcast(self, x: Tensor, root: int) -> None:
        """Copy a contiguous tensor from ``root``, in place.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        flat = x.view(-1)
        slots = self._of(flat.dtype)
        width = slots.shape[2]
        for start in range(0, flat.numel(), width):
            part = flat[start : start + width]
            here = self._next(slots)[0, : part.numel()]
            if self.rank == root:
                here.copy_(part)
            self.barrier()
            if self.rank != root:
                part.copy_(here)

    def barrier(self) -> None:
        """Return when every rank has come here.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        self._count += 1
        # x86 keeps the order of stores: a reader of the count sees what was written before.
        self._lines[self.rank, _COUNT] = self._count
        for other in range(self.world):
            self._until(other, _COUNT, self._count)

    def _until(self, other: int, what: int, number: int) -> None:
        """Wait until a rank has counted so far."""
        counters = self._lines[:, what]
        for _ in range(SPINS):
            if counters[other] >= number:
                return
        begin = looked = time.monotonic()
        while counters[other] < number:
            time.sleep(NAP_S)
            now = time.monotonic()
            if now - looked > 0.1:
                looked = now
                if not runs(int(self._lines[other, _PROCESS])) and counters[other] < number:
                    raise RuntimeError(f"rank {other} has ended")
                if now - begin > self.timeout_s:
                    raise RuntimeError(f"rank {other} did not come in {self.timeout_s:g} s")

    def _of(self, dtype: torch.dtype) -> Tensor:
        """The slots [2, ranks, elements] as tensors of ``dtype``."""
        if dtype not in self._typed:
            self._typed[dtype] = self._slots.view(dtype)
        return self._typed[dtype]

    def _next(self, slots: Tensor) -> Tensor:
        self._turn ^= 1
        return slots[self._turn]


def join_file(
    rank: int, world: int, *, size: int, reserve: int, group: ProcessGroup | None = None
) -> int | None:
    """Open one nameless file in all ranks of a process group; None if that cannot be.

    Every rank calls it, and every rank gets the same answer.

    Args:
        rank: this rank.
        world: number of ranks.
        size: bytes of the file.
        reserve: of these, bytes at its beginning for which memory is taken now.
        group: the ranks' group.
    """
    import torch
    import torch.distributed as dist

    file, name = -1, b""
    if rank == 0:
        file, name = _create(size, reserve)
    names: list[Any] = [(name, _namespace())]
    dist.broadcast_object_list(names, group=group, group_src=0)
    result, namespace = names[0]
    if rank and result and namespace == _namespace():
        file = _open(result, size)
    able = torch.tensor([int(file >= 0)])
    dist.all_reduce(able, dist.ReduceOp.MIN, group=group)
    if rank == 0 and result:
        os.unlink(result)
    if able.item():
        return file
    if file >= 0:
        os.close(file)
    return None


def _header(world: int) -> int:
    return -(-world * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(world: int) -> int:
    parts = 2 * _PARTS * _PART if world == 2 else 0
    return _header(world) + 2 * world * _CHUNK + parts


def _namespace() -> str:
    """Which processes and which network are ours.

    Ranks of another container cannot be watched, and those with a network of their own, such as
    emulated hosts, are to be reached over it.
    """
    try:
        return " ".join(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net"))
    except OSError:
        return ""


def _create(size: int, reserve: int) -> tuple[int, bytes]:
    """A new file and its name; (-1, b"") where shared memory cannot serve."""
    if platform.machine() not in ("x86_64", "AMD64") or not _namespace():
        return -1, b""
    try:
        name = SHARED_MEMORY / shm_name("ranks")
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1, b""
    try:
        # Reserved now: a full file system would otherwise kill the ranks at first touch.
        os.truncate(file, size)
        os.posix_fallocate(file, 0, reserve)
    except OSError:
        os.close(file)
        os.unlink(name)
        return -1, b""
    return file, os.fsencode(name)


def _open(name: bytes, size: int) -> int:
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return -1
    if os.fstat(file).st_size != size:
        os.close(file)
        return -1
    return file


def runs(process: int) -> bool:
    """Whether a process exists and is more than an entry that waits to be collected."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
