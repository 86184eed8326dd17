"""Copies between places, one after another, on a thread of their own.

A mover is one way from one tier to another. Copies wait in a bounded queue: a caller that adds more
than the way can take waits. A :class:`Ticket` shows when a copy is done, how long it took, and
what went wrong. Torch's and the system's copies hold no lock of Python's, so a thread is enough;
on a GPU the thread has a stream of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shoal.core.errors import MachineError, require
from shoal.memory.tiers.disk import DiskTier
from shoal.memory.tiers.tier import TierBlock

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass
class EmulatedLink:
    """A way that is no faster than its set rate; several movers may share one.

    Args:
        latency_s: of every transfer.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        require(self.bytes_per_s > 0, "link bytes_per_s", self.bytes_per_s, expected="above 0")
        require(self.latency_s >= 0, "link latency_s", self.latency_s, expected="at least 0")

    def book(self, nbytes: int, asked_at: float | None = None) -> float:
        """The moment (``time.perf_counter``) at which a transfer is through.

        Args:
            nbytes: of the transfer.
            asked_at: time of the request; now if not given. A link with waiting transfers is not
                idle between two of them, however late a thread wakes up.
        """
        with self._lock:
            begin = max(time.perf_counter() if asked_at is None else asked_at, self._free_at)
            self._free_at = begin + self.latency_s + nbytes / self.bytes_per_s
            return self._free_at


class Ticket:
    """One copy under way.

    Attributes:
        nbytes: its size.
        asked_at: time of the request (``time.perf_counter``).
        done_at: the moment at which it was over.
        seconds: how long it took, once it is done; waiting in the queue is not counted.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0
        self.asked_at = time.perf_counter()
        self.done_at = 0.0
        self._event = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._event.is_set()

    def wait(self) -> float:
        """Return when it is done; s for which the caller waited.

        Raises:
            ShoalError: what went wrong.
        """
        begin = time.perf_counter()
        self._event.wait()
        if self._error is not None:
            raise self._error
        return time.perf_counter() - begin

    def finish(self, seconds: float, error: BaseException | None = None) -> None:
        """Notify all that wait; called once, by the mover."""
        self.seconds, self._error = seconds, error
        self.done_at = time.perf_counter()
        self._event.set()


class Mover:
    """Copies in the order of the requests.

    Args:
        name: of its thread, such as ``disk-host``.
        link: holds copies to a rate.
        depth: copies that may wait.
        device: for a GPU, copies run on a separate stream.
    """

    def __init__(
        self, name: str, *, link: EmulatedLink | None = None, depth: int = 8, device: str = "cpu"
    ) -> None:
        self.name, self.link = name, link
        self.bytes = 0
        self.busy_s = 0.0
        self._device = device
        # The action, whom to notify, and on a GPU what must be done before: the memory to be copied
        # may still be written, or have been another's, on the stream that asks.
        self._queue: queue.Queue[tuple[Callable[[], None], Ticket, Ticket | None, Any] | None]
        self._queue = queue.Queue(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"mover {name}", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], None], nbytes: int, *, after: Ticket | None = None
    ) -> Ticket:
        """Have something done on this way that moves so many bytes.

        Args:
            work: what moves them.
            nbytes: how many.
            after: what must be done before; what went wrong with it goes wrong here.

        Raises:
            MachineError: the mover is closed.
        """
        if self._closed:
            raise MachineError(f"mover {self.name}: closed; nothing can be moved any more")
        ticket = Ticket(nbytes)
        before = None
        if self._device != "cpu":
            import torch

            before = torch.cuda.current_stream(self._device).record_event()
        self._queue.put((work, ticket, after, before))
        return ticket

    def copy(self, source: Tensor, target: Tensor) -> Ticket:
        """Copy a tensor in memory into another of its shape."""
        return self.submit(lambda: copied(source, target), source.nbytes)

    def read(self, tier: DiskTier, block: TierBlock, into: Tensor) -> Ticket:
        """Fill ``into``, uint8 of :func:`~shoal.memory.tiers.disk.staging`, from a block."""

        def work() -> None:
            tier.read(block, into)
            tier.stats.bytes_out += block.nbytes

        return self.submit(work, block.nbytes)

    def write(self, tier: DiskTier, block: TierBlock, data: Tensor) -> Ticket:
        """Write ``data``, uint8 of :func:`~shoal.memory.tiers.disk.staging`, to a block on disk."""

        def work() -> None:
            tier.write(block, data)
            tier.stats.bytes_in += block.nbytes

        return self.submit(work, block.nbytes)

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> Self:
        """The mover itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        import torch

        stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._device != "cpu":
            own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream = torch.cuda.stream(own)
        with stream, torch.no_grad():
            while (item := self._queue.get()) is not None:
                work, ticket, after, before = item
                begin = through = time.perf_counter()
                error: BaseException | None = None
                try:
                    asked_at = ticket.asked_at
                    if after is not None:
                        after.wait()
                        asked_at = max(asked_at, after.done_at)
                    if self.link is not None:
                        through = self.link.book(ticket.nbytes, asked_at)
                    if before is not None:
                        torch.cuda.current_stream().wait_event(before)
                    work()
                    if self._device != "cpu":
                        torch.cuda.current_stream().synchronize()
                except BaseException as cause:  # raised to the waiting caller
                    error = cause
                time.sleep(max(0.0, through - time.perf_counter()))
                seconds = time.perf_counter() - begin
                self.bytes += ticket.nbytes
                self.busy_s += seconds
                # What was copied is not kept until the next copy comes.
                del work, item, after
                ticket.finish(seconds, error)


def copied(source: Tensor, target: Tensor) -> None:
    """Copy a tensor into another of its shape."""
    target.copy_(source)


def end_of_work(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU is through with everything it has been given so far; None on a CPU, where it is.

    Whatever a mover does to memory that the GPU computes with waits for it.
    """
    import torch

    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
