"""Copies are made while the next step computes, and training waits only before its update.

Weights and optimizer state do not change in forward and backward. So ``save`` only notes what there
is; a thread copies it chunk by chunk into a ring of host memory, and another writes each chunk to
the disk as soon as it is there and gives its place back. ``before_update`` waits for what has not
been copied yet. Buffers that the forward pass changes are copied before ``save`` returns. A tensor
that changed without either is noticed by its version or by a digest of its bytes before and after
the copy, and the save dropped; see :mod:`shoal.checkpoint.tensor_snapshot` for what a sample cannot
notice.

Source: Maurya et al., DataStates-LLM: Lazy Asynchronous Checkpointing, 2024, sections III and IV.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.checkpoint.background import Background
from shoal.checkpoint.modes.cost import estimate, saved_bytes, seconds_of
from shoal.checkpoint.plan import WritePlanner
from shoal.checkpoint.protocols import SaveTicket
from shoal.checkpoint.source import CHUNK_BYTES, ByteSource, host_memory
from shoal.checkpoint.store import plain_meta
from shoal.core.errors import CheckpointError, ShoalError, require
from shoal.core.parts import part
from shoal.core.sizes import Size

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.image import Chunk, Image
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.store import Store
    from shoal.ir import Estimate, Machine, Work

# A ring of less than two chunks has nothing to write while it is being filled.
_LEAST_CHUNKS = 2
_MARGIN = 1.2


@part
class Lazy:
    """Copy to host memory during the next forward and backward pass, then write in the background.

    Args:
        host_buffer: bytes of host memory; 1.2 times the bytes that a rank writes if not given. With
            less, the copy waits for the disk.
        chunked: copy a tensor that is larger than the buffer in chunks; if false, this is an error.
        watch: how changes of tensors during the copy are detected: by a ``sample`` of their bytes,
            or by a ``full`` digest, for which training waits.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"saves_behind"})
    host_buffer: Size | None = None
    chunked: bool = True
    watch: Literal["sample", "full"] = "sample"

    def __post_init__(self) -> None:
        least = _LEAST_CHUNKS * CHUNK_BYTES
        require(
            self.host_buffer is None or self.host_buffer >= least,
            "save_mode.lazy.host_buffer",
            self.host_buffer,
            expected=f"at least {least} bytes, two chunks",
        )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Nothing, as long as a copy takes less than forward and backward."""
        size = _MARGIN * saved_bytes(work) if self.host_buffer is None else float(self.host_buffer)
        return estimate(0.01 * seconds_of(work, machine)[0], size)

    def build(self, store: Store, peers: Peers, *, device: str = "cpu") -> LazySaver:
        return LazySaver(store, peers, self, pinned=device.startswith("cuda"))


class RingBuffer:
    """A ring buffer in host memory.

    Args:
        nbytes: its size, at least; whole chunks.
        pinned: a device copies into it.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.chunks = max(_LEAST_CHUNKS, -(-nbytes // CHUNK_BYTES))
        self._pinned = pinned
        self._memory: Tensor | None = None
        self._free = threading.Semaphore(self.chunks)
        self._next = 0

    def take(self) -> Tensor:
        """The next chunk, when it is free; the first call makes them all, behind training."""
        if self._memory is None:
            self._memory = host_memory(self.chunks * CHUNK_BYTES, pinned=self._pinned)
        self._free.acquire()
        first = self._next * CHUNK_BYTES
        self._next = (self._next + 1) % self.chunks
        return self._memory[first : first + CHUNK_BYTES]

    def give_back(self) -> None:
        """The oldest chunk in use is free."""
        self._free.release()


class Capture:
    """One save: how far it has been copied, and the chunks on their way to the disk.

    Args:
        source: what is copied.
        ring: where to.
        ticket: of the save.
        given: names of all tensors; those that another rank writes may change at any time.
    """

    def __init__(
        self, source: ByteSource, ring: RingBuffer, ticket: SaveTicket, given: Collection[str] = ()
    ) -> None:
        self.source = source
        self.ring = ring
        self.ticket = ticket
        self._ready: queue.SimpleQueue[tuple[int, Tensor] | ShoalError | None] = queue.SimpleQueue()
        self._captured = 0
        self._moved = threading.Condition()
        self._dropped = self._lent = self._ended = False
        slots = source.image.slots
        self._ends = dict.fromkeys(given, 0)
        for slot in slots:
            self._ends[slot.name] = max(slot.stop, self._ends.get(slot.name, 0))
        self._size = source.image.size

    def copy(self) -> None:
        """Copy everything; runs in the copier's thread."""
        size = self.source.image.size
        error: ShoalError | None = None
        try:
            for at in range(0, size, CHUNK_BYTES):
                out = self.ticket.timed(self.ring.take, phase="reserve")
                out = out[: min(CHUNK_BYTES, size - at)]
                if self._dropped:
                    self.ring.give_back()
                    break
                try:
                    self.ticket.timed(functools.partial(self.source.fill, at, out), phase="copy")
                except BaseException:
                    self.ring.give_back()
                    raise
                self._ready.put((at, out))
                self._reached(at + len(out))
        except ShoalError as cause:
            error = cause
        except Exception as cause:  # a thread has no caller
            error = CheckpointError(f"step {self.ticket.step}: {type(cause).__name__}: {cause}")
        self._ready.put(error)
        self._reached(size)

    def _reached(self, at: int) -> None:
        with self._moved:
            self._captured = at
            self._moved.notify_all()

    def wait(self, names: Collection[str] | None) -> None:
        """Return when these tensors, or all, are copied or given up."""
        if names is None:
            end = self._size
        else:  # an unknown one may be anything
            end = max((self._ends.get(name, self._size) for name in names), default=0)
        if self._captured >= end:
            return
        begin, reserved = time.perf_counter(), self._reserved()
        with self._moved:
            self._moved.wait_for(lambda: self._captured >= end)
        waited = time.perf_counter() - begin
        # The copier's own waiting for room is the disk's fault, the rest the copy's.
        pressed = min(waited, self._reserved() - reserved)
        self.ticket.blocked("back_pressure", pressed)
        self.ticket.blocked("before_update", waited - pressed)

    def _reserved(self) -> float:
        return self.ticket.phases_s.get("reserve", 0.0)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        # Once the next is asked for, the last one is no longer needed.
        self._return()
        item = self._ready.get()
        if isinstance(item, tuple):
            self._lent = True
            at, out = item
            return at, out.numpy()
        self._ended = True
        if item is not None:
            raise item
        raise StopIteration

    def _return(self) -> None:
        if self._lent:
            self._lent = False
            self.ring.give_back()

    def close(self) -> None:
        """End the capture: ready chunks are released, and no more are created."""
        self._dropped = True
        self._return()
        if not self._ended:
            threading.Thread(target=self._drain, name="checkpoint-drain", daemon=True).start()

    def _drain(self) -> None:
        while isinstance(self._ready.get(), tuple):
            self.ring.give_back()


class LazySaver:
    """See :class:`~shoal.checkpoint.protocols.Saver`.

    Args:
        pinned: tensors lie on a device.
    """

    def __init__(self, store: Store, peers: Peers, options: Lazy, *, pinned: bool) -> None:
        self._background = Background(store, peers)
        self._planner = WritePlanner(peers)
        self._options = options
        self._pinned = pinned
        self._ring: RingBuffer | None = None
        self._captures: list[Capture] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
        self._copier.start()

    def save(self, step: int, pieces: Given, meta: Mapping[str, Any]) -> SaveTicket:
        ticket = SaveTicket(step)
        begin = time.perf_counter()
        plain = plain_meta(meta, step)
        planned = self._planner.plan(pieces)
        ticket.fresh_plan = planned.fresh
        ring = self._ring_for(planned.image)
        ticket.blocked("plan", time.perf_counter() - begin)
        chosen = planned.chosen(pieces)
        volatile = {key: one for key, one in chosen.items() if one.piece.volatile}
        if volatile:  # it is small, and the next forward pass does not wait
            begin = time.perf_counter()
            chosen |= {k: one._replace(piece=one.piece.copied()) for k, one in volatile.items()}
            ticket.blocked("copy", time.perf_counter() - begin)
        begin = time.perf_counter()
        source = ByteSource(planned.image, chosen, self._options.watch)
        ticket.blocked("watch", time.perf_counter() - begin)
        capture = Capture(source, ring, ticket, pieces)
        self._captures = [c for c in self._captures if not c.ticket.done()]
        self._captures.append(capture)
        self._background.submit(ticket, planned.image, capture, plain, source.checksums)
        self._work.put(capture.copy)
        return ticket

    def before_update(self, names: Collection[str] | None = None) -> None:
        for capture in self._captures:
            capture.wait(names)

    def finished(self) -> list[SaveTicket]:
        return self._background.finished()

    def close(self, *, abandon: bool = False) -> None:
        self._background.close(abandon=abandon)
        self._work.put(None)
        if not abandon:
            self._copier.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _ring_for(self, image: Image) -> RingBuffer:
        """The ring, made at the first save; another only where none was prescribed."""
        given = self._options.host_buffer
        wanted = int(_MARGIN * image.size) if given is None else int(given)
        if not self._options.chunked:
            for slot in image.slots:
                if slot.stop - slot.start > wanted:
                    raise CheckpointError(
                        f"tensor {slot.name!r}: {slot.stop - slot.start} bytes do not fit into "
                        f"the host buffer of {wanted}; give save_mode.lazy.host_buffer more, or "
                        "chunked: true"
                    )
        if self._ring is None or (given is None and self._ring.chunks * CHUNK_BYTES < wanted):
            self._ring = RingBuffer(wanted, pinned=self._pinned)
        return self._ring
