"""The process that updates parameters while another one trains.

``python -m shoal.memory.fuyou.optimizer_process FD`` is started by
:class:`~shoal.memory.fuyou.consumer.Consumer` and asked, through the socket FD, to update pieces of
parameters. The gradient of a piece lies in memory that both have; weight and state are read from
the trainer's disk, updated and written back, three pieces at a time: one is read, one updated, one
written. It has an interpreter of its own, so it computes while the trainer does, and it ends when
the trainer does, however that ends.

Source: Liao et al., Fuyou, 2024, section 4.3 (out-of-core optimizer that runs with the backward
pass).
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoal.core.errors import ShoalError
from shoal.core.janitor import leave
from shoal.memory.fuyou.needs import STAGED
from shoal.memory.tiers.disk import SECTOR, DiskTier, staging
from shoal.memory.tiers.mover import Mover, Ticket
from shoal.memory.tiers.shared import SharedLink, SharedPages
from shoal.memory.tiers.tier import TierBlock

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.streaming.subgroups import ElementwiseOptimizer


class ParameterLocation(NamedTuple):
    """Where one parameter lies.

    Args:
        weight: on disk.
        states: state of the optimizer -> block on disk.
        dtype: of all of them.
        matrix: it is one.
    """

    weight: TierBlock
    states: dict[str, TierBlock]
    dtype: torch.dtype
    matrix: bool


class Setup(NamedTuple):
    """What the process receives first.

    Args:
        rule: how parameters are updated.
        memory: descriptor of the common memory.
        slot_bytes: of one gradient in it.
        numel: most elements of a piece.
        disk: descriptor, directory and capacity of the disk's file, and whether it is direct.
        links: rate, latency and descriptor of those that emulate the disk.
        threads: that update.
    """

    rule: ElementwiseOptimizer
    places: tuple[ParameterLocation, ...]
    memory: int
    memory_bytes: int
    slot_bytes: int
    numel: int
    disk: tuple[int, str, int, bool]
    links: tuple[tuple[float, float, int] | None, tuple[float, float, int] | None]
    threads: int


class UpdateRequest(NamedTuple):
    """A piece to be updated.

    Args:
        number: by which its end is reported.
        place: of which parameter.
        first: element.
        numel: elements.
        slot: of the gradient; -1 for zeros.
        step: updates made before this one.
        factor: scales the learning rate.
    """

    number: int
    place: int
    first: int
    numel: int
    slot: int
    step: int
    factor: float


def share_of(numel: int, itemsize: int) -> int:
    """Bytes of one kind of numbers in a staging buffer."""
    return -(-numel * itemsize // SECTOR) * SECTOR


@dataclass
class _Piece:
    order: UpdateRequest
    buffer: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    read: Ticket | None = None
    written: Ticket = field(default_factory=lambda: Ticket(0))
    update_s: float = 0.0


class OptimizerServer:
    """Serves one trainer until it ends.

    Args:
        connection: to it.
        setup: what it has sent.
        disk: its disk.
    """

    def __init__(self, connection: Connection, setup: Setup, disk: DiskTier) -> None:
        self._connection, self._setup, self._disk = connection, setup, disk
        self._memory = SharedPages(setup.memory_bytes, setup.memory)
        self._talking = threading.Lock()
        self._orders: queue.SimpleQueue[UpdateRequest | None] = queue.SimpleQueue()
        self._reading, self._writing = Mover("read"), Mover("write")
        # What is not written yet must not be read.
        self._unwritten: dict[tuple[int, int], Ticket] = {}
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        itemsize = max((place.dtype.itemsize for place in setup.places), default=4)
        self._share = share_of(setup.numel, itemsize)
        for _ in range(STAGED):
            self._buffers.put(staging(self._share * (1 + len(setup.rule.states))))

    def run(self) -> None:
        """Update what is ordered until the trainer says or shows that it is over."""
        threading.Thread(target=self._listen, daemon=True).start()
        pieces: deque[_Piece] = deque()
        over = False
        while True:
            while len(pieces) < STAGED - 1 and not over:
                try:
                    order = self._orders.get(block=not pieces)
                except queue.Empty:
                    break
                if order is None:
                    over = True
                else:
                    pieces.append(self._begin(order))
            if not pieces:
                break
            self._finish(pieces.popleft())
        self._reading.close()
        self._writing.close()

    def _listen(self) -> None:
        try:
            while (order := self._connection.recv()) is not None:
                self._orders.put(order)
        except (EOFError, OSError):  # the trainer is gone
            leave(0)
        self._orders.put(None)

    def _tell(self, *message: Any) -> None:
        with self._talking:
            self._connection.send(message)

    def _begin(self, order: UpdateRequest) -> _Piece:
        piece = _Piece(order)
        key = order.place, order.first
        before, self._unwritten[key] = self._unwritten.get(key), piece.written
        piece.read = self._reading.submit(lambda: self._load(piece, before), 0)
        return piece

    def _rows(self, piece: _Piece) -> list[tuple[str, TierBlock, Tensor]]:
        """Name, block and part of the buffer of everything that a piece has on disk."""
        assert piece.buffer is not None
        place = self._setup.places[piece.order.place]
        rows = {"weight": place.weight, **place.states}
        share = self._share
        return [
            (name, block, piece.buffer[at * share : (at + 1) * share])
            for at, (name, block) in enumerate(rows.items())
        ]

    def _load(self, piece: _Piece, before: Ticket | None) -> None:
        if before is not None:
            before.wait()
        piece.buffer = self._buffers.get()
        dtype = self._setup.places[piece.order.place].dtype
        size = piece.order.numel * dtype.itemsize
        for name, block, part in self._rows(piece):
            whole = part[: -(-size // SECTOR) * SECTOR]
            self._disk.read(block, whole, piece.order.first * dtype.itemsize)
            piece.tensors[name] = part[:size].view(dtype)

    def _finish(self, piece: _Piece) -> None:
        """Update a piece that has been read, and have it written."""
        order, setup = piece.order, self._setup
        assert piece.read is not None
        piece.read.wait()
        begin = time.perf_counter()
        place = setup.places[order.place]
        size = order.numel * place.dtype.itemsize
        if order.slot < 0:
            gradient = torch.zeros(order.numel, dtype=place.dtype)
        else:
            gradient = self._memory.bytes_at(order.slot * setup.slot_bytes, size).view(place.dtype)
        setup.rule.update(
            piece.tensors["weight"],
            gradient,
            {name: piece.tensors[name] for name in place.states},
            step=order.step,
            factor=order.factor,
            matrix=place.matrix,
        )
        piece.update_s = time.perf_counter() - begin
        if order.slot >= 0:
            self._tell("free", order.slot)
        self._writing.submit(lambda: self._store(piece), 0)

    def _store(self, piece: _Piece) -> None:
        try:
            itemsize = self._setup.places[piece.order.place].dtype.itemsize
            size = -(-piece.order.numel * itemsize // SECTOR) * SECTOR
            for _, block, part in self._rows(piece):
                self._disk.write(block, part[:size], piece.order.first * itemsize)
            assert piece.buffer is not None
            self._buffers.put(piece.buffer)
            piece.written.finish(0.0)
            self._tell("done", piece.order.number, piece.order.numel, piece.update_s)
        except ShoalError as cause:
            piece.written.finish(0.0, cause)
            self._tell("failed", str(cause))


def main(descriptor: int) -> None:
    """Serve the trainer at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer says when it is over
    connection = Connection(descriptor)
    try:
        setup: Setup = connection.recv()
        torch.set_num_threads(setup.threads)
        file, path, capacity, direct = setup.disk
        one, other = (None if link is None else SharedLink(*link) for link in setup.links)
        disk = DiskTier.of(file, Path(path), capacity, direct=direct, links=(one, other))
        OptimizerServer(connection, setup, disk).run()
    except (EOFError, BrokenPipeError):  # the trainer is gone
        return
    except Exception as cause:
        connection.send(("failed", f"{type(cause).__name__}: {cause}"))
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
