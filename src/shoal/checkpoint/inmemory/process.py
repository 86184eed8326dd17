"""The snapshot process of a rank: ``python -m shoal.checkpoint.inmemory.process``.

It is started by the launcher of the trainers and is no child of them, so what it holds outlives
them. Its memory has no name (``memfd``): the trainer maps it through ``/proc``, and with the
process it is gone, however that ends. It ends itself when its input does, with its starter.

Two slots take turns: one keeps the newest version that can be used, the other is being filled. A
version is usable block by block, each with its CRC: blocks of the piece once the trainer commits,
parities once the ring has been round.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, sections 3 and 4.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.checkpoint.checksum import crc32c
from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory.field import Bytes, native
from shoal.checkpoint.inmemory.stripes import Stripes, pass_on
from shoal.checkpoint.inmemory.wire import (
    SnapshotAddress,
    SnapshotClient,
    exchange_bytes,
    receive,
    refuse,
    send,
    welcome,
)
from shoal.core.errors import CheckpointError, RankError, ShoalError, require
from shoal.core.janitor import leave
from shoal.machine.host import memory_available

# Steps down in the system's order of processes.
_NICE = 10
_SLOTS = 2


class VersionSlot:
    """One version.

    Args:
        data: what the member keeps of it [kept].
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.step: int | None = None
        self.meta: dict[str, Any] = {}
        self.crcs: dict[int, int] = {}
        """Block -> checksum; a block without one cannot be used."""

    def clear(self) -> None:
        """Nothing in it can be used from now on."""
        self.step = None
        self.crcs = {}


class SnapshotProcess:
    """State and requests of the snapshot process.

    Args:
        secret: of the run.
    """

    def __init__(self, run: str, secret: bytes, rank: int) -> None:
        self.run = run
        self.secret = secret
        self.rank = rank
        self.spec: dict[str, Any] | None = None
        self.stripes: Stripes
        self.slots: list[VersionSlot] = []
        self.generation = -1
        self._memory: tuple[int, mmap.mmap] | None = None
        # One change of slots at a time; reading goes on beside it.
        self._lock = threading.Lock()
        self._ring = threading.Condition()
        self._arrived: dict[int, socket.socket] = {}
        self._next: tuple[int, socket.socket] | None = None

    def listen(self, host: str) -> tuple[int, Callable[[], None]]:
        """The port, and what serves there for ever."""
        listener = socket.create_server((host, 0))

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

        return listener.getsockname()[1], serve

    def _attend(self, connection: socket.socket) -> None:
        """Answer one connection until it ends."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            welcome(connection, self.secret, self.run)
            while True:
                header, _ = receive(connection)
                if header["op"] == "ring":
                    self._join(connection, int(header["generation"]))
                    return
                send(connection, *self.answer(header))
        except (OSError, ShoalError, ValueError, KeyError, TypeError) as cause:
            refuse(connection, str(cause))
            connection.close()

    def answer(self, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """What is answered to a request, and the bytes behind it."""
        try:
            return self._do(**header)
        except RankError as cause:
            return {"error": str(cause), "lost": True}, b""
        except ShoalError as cause:
            return {"error": str(cause)}, b""
        except OSError as cause:
            # A member of the ring: the caller gets the error, and the ring is made anew.
            return {"error": f"the ring broke: {cause}", "lost": True}, b""

    def _do(self, op: str, **arguments: Any) -> tuple[dict[str, Any], Any]:
        if op == "read":
            return {}, self.read(**arguments)
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "begin": self.begin,
            "commit": self.commit,
            "encode": self.encode,
            "status": self.status,
            "abort": self.abort,
            "rebuild": self.rebuild,
            "keep": self.keep,
        }
        if op not in known:
            raise CheckpointError(f"{op!r} is nothing a snapshot process can be asked for")
        return known[op](**arguments), b""

    def open(self, spec: dict[str, Any], generation: int, places: list[Any]) -> dict[str, Any]:
        """Take part in a group; memory that fits already is kept, with what lies in it.

        Args:
            spec: ``code``, ``group`` (ranks of the members), ``piece`` (bytes of the largest),
                ``manifests`` (rank -> what of the state it keeps), ``world``.
            generation: of the trainers.
            places: of all snapshot processes, by rank.

        Raises:
            CheckpointError: there is not enough memory for two slots.
        """
        with self._lock:
            self.generation = generation
            self.places = [SnapshotAddress.model_validate(place) for place in places]
            if spec != self.spec:
                self._allocate(spec)
            assert self._memory is not None
            return {
                "pid": os.getpid(),
                "file": self._memory[0],
                "kept": self.stripes.kept,
                "block": self.stripes.block,
                "stride": self._stride,
            }

    def _allocate(self, spec: dict[str, Any]) -> None:
        code = MEMORY_CODES.build(spec["code"])
        stripes = Stripes.of(code, len(spec["group"]), int(spec["piece"]))
        stride = -(-stripes.kept // mmap.PAGESIZE) * mmap.PAGESIZE
        need, free = _SLOTS * stride, memory_available()
        self._release()
        require(
            need <= free,
            "checkpoint.memory: free host memory",
            f"{free} bytes",
            expected=f"{need} bytes: {_SLOTS} slots of {stripes.data} blocks and "
            f"{stripes.parity} parities of {stripes.block} bytes",
            hint="shard over more replicas, or leave checkpoint.memory out",
            error=CheckpointError,
        )
        file = os.memfd_create(f"shoal-memory-{self.rank}")
        try:
            # Reserved now: what is short later would end the trainer that touches it first.
            os.posix_fallocate(file, 0, need)
        except OSError as cause:
            os.close(file)
            raise CheckpointError(
                f"checkpoint.memory: {need} bytes for {_SLOTS} slots cannot be allocated: {cause}"
            ) from cause
        mapped = mmap.mmap(file, need)
        view = np.frombuffer(mapped, np.uint8)
        self.slots = [
            VersionSlot(view[i * stride : i * stride + stripes.kept]) for i in range(_SLOTS)
        ]
        self._memory, self._stride = (file, mapped), stride
        self.stripes, self.spec = stripes, spec
        self.bucket = min(code.bucket, stripes.block)
        # Kept from version to version: fresh pages would cost more than the sums in them.
        self._buffers = [np.empty(max(8, stripes.parity * self.bucket), np.uint8) for _ in range(3)]
        self.member = spec["group"].index(self.rank)

    def _release(self) -> None:
        if self._memory is not None:
            os.close(self._memory[0])
            # The mapping goes with the last slice of it.
            self.slots, self._memory, self.spec = [], None, None

    def begin(self) -> dict[str, Any]:
        """The slot in which a step may be written; what was usable in it no longer is.

        Raises:
            CheckpointError: nothing was opened yet.
        """
        with self._lock:
            self._opened()
            # An empty one, else one that was never coded, else the older: the best stays.
            slot = min(self.slots, key=lambda s: (s.step is not None, self._coded(s), s.step or 0))
            slot.clear()
            return {"slot": self.slots.index(slot)}

    def commit(
        self, step: int, slot: int, meta: dict[str, Any], crcs: list[int], end: int
    ) -> dict[str, Any]:
        """The trainer has written ``step`` into the slot: seal it, then code it in the ring.

        Returns when the version is coded on this member.

        Args:
            step: which.
            slot: where.
            meta: what the trainer keeps beside.
            crcs: of the blocks, as the trainer has read them from its tensors.
            end: bytes of the piece; what is behind them in the last blocks is no part of it.

        Raises:
            CheckpointError: another member commits another step.
            OSError: a member of the ring is gone; the piece itself stays usable.
        """
        began = time.perf_counter()
        with self._lock:
            self._opened()
            result = self.slots[slot]
            self._seal(result, crcs, end)
            result.meta, result.step = meta, step
        sealed = time.perf_counter()
        self._code(result, step)
        return {"seal_s": sealed - began, "code_s": time.perf_counter() - sealed}

    def encode(self, step: int, generation: int, places: list[Any]) -> dict[str, Any]:
        """Code a version whose parities were not finished, with all others of the group."""
        with self._lock:
            self.generation = generation
            self.places = [SnapshotAddress.model_validate(place) for place in places]
            result = self._slot(step)
        self._code(result, step)
        return {}

    def status(self, verify: bool = False) -> dict[str, Any]:
        """What this process is part of, and which blocks of which steps it can give.

        With ``verify`` every block is summed again, and one that has changed is dropped.
        """
        with self._lock:
            if verify:
                for slot in self.slots:
                    for block, crc in list(slot.crcs.items()):
                        if crc32c(self._block(slot, block)) != crc:
                            del slot.crcs[block]
            return {
                "rank": self.rank,
                "pid": os.getpid(),
                "spec": self.spec,
                "slots": [
                    {"step": s.step, "blocks": sorted(s.crcs), "meta": s.meta}
                    for s in self.slots
                    if s.step is not None
                ],
            }

    def read(self, step: int, block: int, offset: int, length: int) -> memoryview:
        """Bytes of a block.

        Raises:
            CheckpointError: the block of this step cannot be used, or does not reach so far.
        """
        slot = self._slot(step)
        if block not in slot.crcs:
            raise CheckpointError(f"block {block} of step {step} is not there, or is damaged")
        require(
            min(offset, length) >= 0 and offset + length <= self.stripes.block,
            "bytes of a block",
            f"{offset} and {length} more",
            expected=f"within {self.stripes.block}",
            error=CheckpointError,
        )
        return self._block(slot, block)[offset : offset + length].data

    def rebuild(
        self,
        spec: dict[str, Any],
        step: int,
        generation: int,
        places: list[Any],
        there: list[list[int]],
        meta: dict[str, Any],
    ) -> dict[str, Any]:
        """Restore what this member kept of ``step`` from the other members of its group.

        Args:
            spec: as of :meth:`open`.
            step: which version.
            generation: of the trainers.
            places: of all snapshot processes, by rank.
            there: member -> blocks of this step that it can give.
            meta: what the trainers have kept beside.

        Raises:
            CheckpointError: too much is lost, or a member holds another step.
        """
        self.open(spec, generation, places)
        began = time.perf_counter()
        with self._lock, contextlib.ExitStack() as opened:
            others: dict[int, SnapshotClient] = {}
            buffer = np.empty(self.bucket, np.uint8)

            def read(member: int, block: int, offset: int, length: int) -> Bytes:
                if member not in others:
                    rank = spec["group"][member]
                    client = SnapshotClient(self.places[rank], self.run, self.secret, rank=rank)
                    others[member] = opened.enter_context(client)
                into = buffer[:length]
                others[member].call(
                    "read", into=into, step=step, block=block, offset=offset, length=length
                )
                return into

            for slot in self.slots:
                slot.clear()
            self.stripes.rebuild(
                self.member,
                read,
                there,
                self.slots[0].data,
                bucket=self.bucket,
            )
            self._sum(self.slots[0], range(self.stripes.blocks))
            self.slots[0].step, self.slots[0].meta = step, meta
        return {"seconds": time.perf_counter() - began}

    def keep(self, step: int | None) -> dict[str, Any]:
        """Forget every version but this one."""
        with self._lock:
            for slot in self.slots:
                if slot.step != step:
                    slot.clear()
            return {}

    def abort(self) -> dict[str, Any]:
        """End what goes on in the ring; versions that are not coded yet stay as they are."""
        with self._ring:
            ends = [*self._arrived.values(), *([self._next[1]] if self._next else [])]
            self._arrived, self._next = {}, None
            self.generation = -1
            for end in ends:
                with contextlib.suppress(OSError):  # the other side may have ended it
                    end.shutdown(socket.SHUT_RDWR)
            self._ring.notify_all()
        return {}

    def _opened(self) -> None:
        if self.spec is None:
            raise CheckpointError("nothing is open yet")

    def _slot(self, step: int) -> VersionSlot:
        for slot in self.slots:
            if slot.step == step:
                return slot
        held = ", ".join(str(s.step) for s in self.slots if s.step is not None) or "none"
        raise CheckpointError(f"step {step} is not here; there is: {held}")

    def _block(self, slot: VersionSlot, number: int) -> Bytes:
        return slot.data[number * self.stripes.block :][: self.stripes.block]

    def _seal(self, slot: VersionSlot, crcs: list[int], end: int) -> None:
        """The blocks of a piece with what the trainer has summed, and their padding."""
        for block in range(self.stripes.data):
            filled = min(max(0, end - block * self.stripes.block), self.stripes.block)
            padding = self._block(slot, block)[filled:]
            slot.crcs[block] = crc32c(padding, crcs[block] if filled else 0)

    def _sum(self, slot: VersionSlot, blocks: range) -> None:
        for block in blocks:
            slot.crcs[block] = crc32c(self._block(slot, block))

    def _coded(self, slot: VersionSlot) -> bool:
        return len(slot.crcs) == self.stripes.blocks

    def _code(self, slot: VersionSlot, step: int) -> None:
        """This member's part of the ring.

        Raises:
            CheckpointError: the member before is at another step.
            OSError: a neighbour is gone, or the ring was ended.
        """
        try:
            self._pass_on(slot, step)
        except (OSError, ShoalError):
            # Or the next member would wait for ever, and so on round the ring.
            self.abort()
            raise
        with self._lock:
            if slot.step == step:
                self._sum(slot, range(self.stripes.data, self.stripes.blocks))

    def _pass_on(self, slot: VersionSlot, step: int) -> None:
        before, after = self._neighbours()
        first, *others = self._buffers
        # What came last goes out next, so two buffers take turns.
        turns = itertools.cycle(others)

        def exchange(data: Bytes) -> Bytes:
            came = next(turns)[: data.size]
            exchange_bytes(after, before, data.data, came.data)
            return came

        theirs = exchange(np.array([step], np.int64).view(np.uint8)).view(np.int64)[0]
        if theirs != step:
            raise CheckpointError(
                f"rank {self.rank} commits step {step} and the member before it step {theirs}: "
                "a version is of one step"
            )
        pass_on(self.stripes, slot.data, exchange, bucket=self.bucket, scratch=first)

    def _neighbours(self) -> tuple[socket.socket, socket.socket]:
        """Connections from the member before and to the next one, made once a generation."""
        generation = self.generation
        if generation < 0:
            raise ConnectionAbortedError("the ring was ended")
        group = self.spec["group"] if self.spec else []
        with self._ring:
            made = self._next
        if made is None or made[0] != generation:
            rank = group[(self.member + 1) % len(group)]
            client = SnapshotClient(self.places[rank], self.run, self.secret, rank=rank)
            send(client.connection, {"op": "ring", "generation": generation})
            client.connection.setblocking(False)
            with self._ring:
                self._next = made = (generation, client.connection)
        with self._ring:
            while generation not in self._arrived:
                if self.generation != generation:
                    raise ConnectionAbortedError("the ring was ended")
                self._ring.wait()
            return self._arrived[generation], made[1]

    def _join(self, connection: socket.socket, generation: int) -> None:
        connection.setblocking(False)
        with self._ring:
            self._arrived[generation] = connection
            self._ring.notify_all()


def main() -> int:
    """Serve until the input ends.

    Its first line says what to be; the others are requests of the process that started it.
    """
    # What trainers leave of the processors is enough: they are not waited for between two steps.
    os.nice(_NICE)
    given = json.loads(sys.stdin.readline())
    process = SnapshotProcess(given["run"], bytes.fromhex(given["secret"]), int(given["rank"]))
    port, serve = process.listen(given["host"])
    native()  # compiled now, not while a trainer waits
    crc32c(np.empty(0, np.uint8))
    print(json.dumps({"host": given["host"], "port": port, "pid": os.getpid()}), flush=True)
    threading.Thread(target=serve, daemon=True).start()
    for line in sys.stdin:
        print(json.dumps(process.answer(json.loads(line))[0]), flush=True)
    # Threads that wait for a peer must not keep the process.
    leave(0)


if __name__ == "__main__":
    main()
