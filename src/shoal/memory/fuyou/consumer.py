"""The trainer's side of the process that updates parameters.

A gradient that has come to the host lies in one of a few slots of memory that both processes have;
the order to update it goes through a socket, and a thread receives the results. When the other
process ends, callers that wait for it, and later ones, get an error.

Source: Liao et al., Fuyou, 2024, section 4.3 (active gradient offloading).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shoal.core import children
from shoal.core.errors import MachineError, ShoalError
from shoal.memory.fuyou.needs import SLOTS, STAGED
from shoal.memory.fuyou.optimizer_process import ParameterLocation, Setup, UpdateRequest, share_of
from shoal.memory.tiers.mover import Ticket
from shoal.memory.tiers.shared import SharedLink, SharedPages

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shoal.memory.streaming.subgroups import ElementwiseOptimizer
    from shoal.memory.tiers.disk import DiskTier
    from shoal.memory.tiers.mover import EmulatedLink

_END_S = 30.0
_MODULE = "shoal.memory.fuyou.optimizer_process"


def held_bytes(numel: int, itemsize: int, states: int) -> int:
    """Bytes of the host that gradients and staging buffers take, in both processes."""
    return share_of(numel, itemsize) * (SLOTS + STAGED * (1 + states))


class Consumer:
    """Has gradients consumed as they come.

    Args:
        rule: how.
        places: of the parameters, by number.
        disk: where they lie.
        numel: most elements of a piece.
        itemsize: of the largest element.
        threads: of the other process.

    Attributes:
        updated: elements so far.
        update_s: seconds that it computed for them.
    """

    def __init__(
        self,
        rule: ElementwiseOptimizer,
        places: Sequence[ParameterLocation],
        disk: DiskTier,
        *,
        numel: int,
        itemsize: int,
        threads: int,
    ) -> None:
        self._slot_bytes = share_of(numel, itemsize)
        self._memory = SharedPages(SLOTS * self._slot_bytes)
        self._changed = threading.Condition()
        self._free = list(range(SLOTS))
        self._tickets: dict[int, Ticket] = {}
        self._number = 0
        self._error: ShoalError | None = None
        self._closing = False
        self.updated, self.update_s = 0, 0.0
        setup = Setup(
            rule=rule,
            places=tuple(places),
            memory=self._memory.descriptor,
            memory_bytes=self._memory.nbytes,
            slot_bytes=self._slot_bytes,
            numel=numel,
            disk=(disk.descriptor, str(disk.path), disk.capacity, disk.direct),
            links=(_announce(disk.links[0]), _announce(disk.links[1])),
            threads=threads,
        )
        self._start(setup)

    def _start(self, setup: Setup) -> None:
        mine, theirs = socket.socketpair()
        given = [theirs.fileno(), setup.memory, setup.disk[0]]
        given += [link[2] for link in setup.links if link is not None]
        path = os.pathsep.join(filter(None, sys.path))
        try:
            self.process = children.start(
                _MODULE,
                str(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env=children.environment(
                    {"OMP_NUM_THREADS": str(setup.threads), "PYTHONPATH": path}
                ),
            )
        except OSError as cause:
            mine.close()
            self._memory.close()
            raise MachineError(f"offload: the optimizer cannot be started ({cause})") from cause
        finally:
            theirs.close()
        self._connection = Connection(mine.detach())
        self._connection.send(setup)
        self._listener = threading.Thread(target=self._listen, name="optimizer", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            while True:
                kind, *rest = self._connection.recv()
                if kind == "failed":
                    self._fail(MachineError(f"offload: the optimizer failed: {rest[0]}"))
                    return
                self._heard(kind, rest)
        except (EOFError, OSError):
            if not self._closing:
                self._fail(self._died())

    def _heard(self, kind: str, rest: list[Any]) -> None:
        with self._changed:
            if kind == "free":
                self._free.append(rest[0])
            else:
                number, count, seconds = rest
                self.updated += count
                self.update_s += seconds
                self._tickets.pop(number).finish(seconds)
            self._changed.notify_all()

    def _died(self) -> MachineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        return MachineError(
            f"offload: the optimizer's process {self.process.pid} ended (status "
            f"{self.process.returncode}) with {len(self._tickets)} updates to do; parameters are "
            "of no step any more: resume from a checkpoint"
        )

    def _fail(self, error: ShoalError) -> None:
        with self._changed:
            self._error = error
            for ticket in self._tickets.values():
                ticket.finish(0.0, error)
            self._tickets.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what has gone wrong.

        Raises:
            ShoalError: the process failed, or is gone.
        """
        if self._error is not None:
            raise self._error

    def slot(self) -> int:
        """A free slot for a gradient; waits for one.

        Raises:
            ShoalError: the process failed, or is gone.
        """
        with self._changed:
            while not self._free and self._error is None:
                self._changed.wait()
            self.check()
            return self._free.pop()

    def gradient(self, slot: int, count: int, dtype: torch.dtype) -> Tensor:
        """The elements of a slot."""
        raw = self._memory.bytes_at(slot * self._slot_bytes, count * dtype.itemsize)
        return raw.view(dtype)

    def update(
        self, place: int, first: int, count: int, slot: int, *, step: int, factor: float
    ) -> Ticket:
        """Have a piece updated by the gradient in a slot, or by zeros if that is -1.

        Raises:
            ShoalError: the process failed, or is gone.
        """
        with self._changed:
            self.check()
            number, self._number = self._number, self._number + 1
            ticket = self._tickets[number] = Ticket(0)
            order = UpdateRequest(number, place, first, count, slot, step, factor)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the listener reports
                self._connection.send(order)
        return ticket

    def drain(self) -> float:
        """Return when everything is updated and written; s for which this took.

        Raises:
            ShoalError: the process failed, or is gone.
        """
        begin = time.perf_counter()
        with self._changed:
            while self._tickets and self._error is None:
                self._changed.wait()
            self.check()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Let it finish what it has begun, and end it."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.send(None)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        self._connection.close()
        self._memory.close()


def _announce(link: EmulatedLink | None) -> tuple[float, float, int] | None:
    """What the other process must know of a link.

    Raises:
        MachineError: it is this process's alone.
    """
    if link is None:
        return None
    if not isinstance(link, SharedLink):
        raise MachineError("offload: an emulated disk of two processes needs a SharedLink")
    return link.bytes_per_s, link.latency_s, link.descriptor
