"""Training waits for a copy in memory; writing goes on behind it.

Two pools of host memory take turns: one is filled while the other is still being written. A pool
holds the file exactly as it will lie on the disk, so there is nothing to serialise. A third save
while two are being written waits for the older one.

Source: Wan et al., ByteCheckpoint, 2024, section 4.2 (ping-pong pinned memory pools).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from shoal.checkpoint.background import Background
from shoal.checkpoint.modes.cost import estimate, saved_bytes, seconds_of
from shoal.checkpoint.plan import WritePlanner
from shoal.checkpoint.protocols import SaveTicket
from shoal.checkpoint.source import CHUNK_BYTES, ByteSource, host_memory
from shoal.checkpoint.store import plain_meta
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.image import Chunk, Image
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.store import Store
    from shoal.ir import Estimate, Machine, Work

# Training waits, so its cores are free; more than a few do not make memory any faster.
_THREADS = min(4, os.cpu_count() or 1)


@part
class Snapshot:
    """Copy to host memory while training waits, then write in the background.

    Args:
        pools: largest number of concurrent saves; each takes as much host memory as a rank writes.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"saves_behind"})
    pools: Annotated[int, Ge(1)] = 2

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """The copy's time."""
        return estimate(seconds_of(work, machine)[0], self.pools * saved_bytes(work))

    def build(self, store: Store, peers: Peers, *, device: str = "cpu") -> SnapshotSaver:
        return SnapshotSaver(store, peers, self.pools, pinned=device.startswith("cuda"))


class _Pool:
    """Memory for one file.

    Args:
        pinned: a device copies into it.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: Tensor | None = None
        self.free = threading.Event()
        self.free.set()

    def reserve(self, nbytes: int) -> Tensor:
        """The memory, at least so much."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # given back before more is taken
            self._memory = host_memory(nbytes, pinned=self._pinned)
        return self._memory

    def fill(self, source: ByteSource, threads: ThreadPoolExecutor) -> PooledBytes:
        """Copy the pieces to where they lie in the file; runs of them in several threads."""
        memory = self.reserve(source.image.size)[: source.image.size]
        self.free.clear()
        if self._pinned:
            source.fetch(memory)
            return PooledBytes(self, memory, None)
        runs = _runs(source.image, _THREADS)
        try:
            list(threads.map(lambda run: source.fill(run[0], memory[run[0] : run[1]]), runs))
        except BaseException:
            self.free.set()
            raise
        return PooledBytes(self, memory, source.checksums)


def _runs(image: Image, count: int) -> list[tuple[int, int]]:
    """Parts of the file of about equal size that cut no piece."""
    cuts = [0]
    for number in range(1, count):
        ideal = number * image.size // count
        starts = (slot.start for slot in image.slots)
        nearest = min(starts, key=lambda at: abs(at - ideal), default=0)
        cuts.append(max(cuts[-1], nearest))
    return [(a, b) for a, b in itertools.pairwise([*cuts, image.size]) if b > a]


class PooledBytes:
    """The bytes of a file in a pool, released after they are written.

    Args:
        pool: whose they are.
        memory: they.
        checksums: of its pieces, if they were taken.
    """

    def __init__(self, pool: _Pool, memory: Tensor, checksums: Mapping[str, int] | None) -> None:
        self._pool = pool
        self._memory = memory
        self.checksums = checksums

    def __iter__(self) -> Iterator[Chunk]:
        data = self._memory.numpy()
        for at in range(0, len(data), CHUNK_BYTES):
            yield at, data[at : at + CHUNK_BYTES]

    def close(self) -> None:
        """The pool may be filled again."""
        self._pool.free.set()


class SnapshotSaver:
    """See :class:`~shoal.checkpoint.protocols.Saver`.

    Args:
        pools: saves under way at once.
        pinned: tensors lie on a device.
    """

    def __init__(self, store: Store, peers: Peers, pools: int, *, pinned: bool) -> None:
        self._background = Background(store, peers)
        self._planner = WritePlanner(peers)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-copy")
        self._pools = [_Pool(pinned=pinned) for _ in range(pools)]
        self._turn = 0

    def save(self, step: int, pieces: Given, meta: Mapping[str, Any]) -> SaveTicket:
        ticket = SaveTicket(step)
        begin = time.perf_counter()
        plain = plain_meta(meta, step)
        planned = self._planner.plan(pieces)
        ticket.fresh_plan = planned.fresh
        chosen = planned.chosen(pieces)
        planned_at = time.perf_counter()
        ticket.blocked("plan", planned_at - begin)
        pool = self._pools[self._turn % len(self._pools)]
        self._turn += 1
        pool.free.wait()
        free_at = time.perf_counter()
        ticket.blocked("back_pressure", free_at - planned_at)
        if planned.fresh:
            for other in self._pools:  # made now, and not when training is under way
                if other.free.is_set():
                    other.reserve(planned.image.size)
        pooled = pool.fill(ByteSource(planned.image, chosen), self._threads)
        ticket.blocked("copy", time.perf_counter() - free_at)
        self._background.submit(ticket, planned.image, pooled, plain, pooled.checksums)
        return ticket

    def before_update(self, names: Collection[str] | None = None) -> None:
        """Everything was copied when ``save`` returned."""

    def finished(self) -> list[SaveTicket]:
        return self._background.finished()

    def close(self, *, abandon: bool = False) -> None:
        self._background.close(abandon=abandon)
        self._threads.shutdown()
