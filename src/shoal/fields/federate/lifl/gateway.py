"""The gateway of a host: a process that receives updates into the store and runs the aggregators.

It is the only one that talks to the network. A body is received into its slot and is not copied
again on this host: a message says to the server of the federation that it is there, the answer
has its weight, and from then on 16 bytes travel. What the host has summed is streamed to the
gateway of the top host, or, on that host, is an object that the server finds in the store.

Messages with the server, JSON over an inherited socket: ``arrived`` (answered by ``verdict``),
``fold``, ``drop``, ``flush`` (answered by ``total``), ``free``, ``facts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import re
import resource
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core import children
from shoal.fields.federate.aggregate.sums import all_finite
from shoal.fields.federate.exchange import exchange_of
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.lifl.store import ObjectStore
from shoal.fields.federate.lifl.tree import Tree, TreeOptions
from shoal.fields.federate.planes.process import Process, serve
from shoal.fields.federate.protocols import FederationError, LocalJob, UpdateRefusedError
from shoal.fields.federate.wire.bodies import post
from shoal.fields.federate.wire.keys import Keys, server_tls
from shoal.fields.federate.wire.messages import HEADER_BYTES, loss_of, unpack
from shoal.fields.federate.wire.receive import (
    UPDATE_PATH,
    RequestHead,
    RequestRefusedError,
    Upload,
)

_SUM = re.compile(r"/v1/sums/([0-9.e+-]{1,32})/(\d{1,9})")


class Gateway(Process):
    """Routes, store and aggregators of a host.

    Args:
        given: what the server has written to standard input.
        channel: to the server.
    """

    def __init__(self, given: Mapping[str, Any], channel: socket.socket) -> None:
        self._size: int = given["size"]
        job = FederateJob.model_validate(given["job"])
        tls = server_tls(job.certfile, job.keyfile) if job.certfile else None
        super().__init__(channel, 4 * self._size + HEADER_BYTES, tls)
        self._token: str = given["token"]
        self._store = ObjectStore(given["file"], given["slots"], given["slot_bytes"])
        self._keys = Keys(given["keys"])
        self._exchange = exchange_of(job, tuple(given["names"]))
        self._certfile: str = job.certfile
        self._processes: dict[int, tuple[subprocess.Popen[Any], socket.socket]] = {}
        self._ended: list[subprocess.Popen[Any]] = []
        self._tree = Tree(self._store, self._size, TreeOptions(**given["tree"]), self)
        self._verdicts: dict[bytes, asyncio.Future[str | None]] = {}
        self._sending: set[str] = set()
        self.full = self._hop_bytes = 0

    # Requests

    def accept(self, head: RequestHead) -> Upload:
        """An update of a client, or the sum of another host.

        Raises:
            RequestRefusedError: it is neither, or there is no room.
        """
        given = head.headers.get("authorization", "")
        update, total = UPDATE_PATH.fullmatch(head.path), _SUM.fullmatch(head.path)
        if head.method != "POST" or not (update or total):
            raise RequestRefusedError(
                404, f"{head.method} {head.path[:80]}: there is no such thing"
            )
        if total:
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise RequestRefusedError(401, "sums come from gateways")
            if head.size != 4 * self._size:
                raise RequestRefusedError(422, f"sum: {head.size} bytes of {4 * self._size}")
            return _Sum(self, self._reserve(0), head.size, float(total[1]), int(total[2]))
        assert update is not None
        name = update[1]
        if not self._keys.holds(name, given):
            raise RequestRefusedError(401, f"client {name!r}: unknown, or another's key")
        if head.size > 4 * self._size + HEADER_BYTES:
            raise RequestRefusedError(
                422, f"update: more than {4 * self._size + HEADER_BYTES} bytes"
            )
        if name in self._sending:
            raise RequestRefusedError(409, f"client {name}: sends another update already")
        slot = self._reserve(self._tree.reserve)
        self._sending.add(name)
        return _ClientUpdate(self, slot, head.size, name, int(update[2]))

    def _reserve(self, keep: int) -> int:
        slot = self._store.reserve() if self._store.free > keep else None
        if slot is None:
            self.full += 1
            raise RequestRefusedError(503, "the store is full; send it again a little later")
        return slot

    def give_back(self, slot: int) -> None:
        """A slot into which nothing whole was written."""
        self._store.give_back(slot)

    def room(self, slot: int, size: int) -> memoryview:
        """The beginning of a slot."""
        return self._store.room(slot)[:size]

    def let_go(self, name: str) -> None:
        """A client's upload has ended."""
        self._sending.discard(name)

    async def take(self, slot: int, size: int, name: str, number: int) -> None:
        """An update has come into a slot: ask the server whether it wants it.

        Raises:
            RequestRefusedError: it does not, or the update is wrong.
        """
        try:
            loss, offset = self._decode(slot, size, name, number)
            wrong: list[str] = []
        except UpdateRefusedError as cause:
            loss, offset, wrong = 0.0, 0, [str(cause), cause.reason]
        self.received += size
        key = self._store.publish(
            slot, offset=offset, count=self._size, coefficient=0.0, weight=0.0, updates=1
        )
        verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._verdicts[key] = verdict
        self.say("arrived", key=key.hex(), client=name, number=number, loss=loss, wrong=wrong)
        refused = await verdict
        if refused is not None:
            self._store.release(key)
            raise RequestRefusedError(422, refused)

    def _decode(self, slot: int, size: int, name: str, number: int) -> tuple[float, int]:
        """The loss, and where in the slot the numbers of the update begin."""
        tensors, words = unpack(self._store.room(slot)[:size])
        job = LocalJob(number=number, client=name, version=0, steps=0, started=0.0)
        delta = self._exchange.decode(job, tensors, self._size)
        where = f"update {number} of {name}"
        if delta.shape != (self._size,) or delta.dtype != np.float32:
            raise UpdateRefusedError(
                f"{where}: {delta.dtype} {list(delta.shape)}; float32 [{self._size}] are expected",
                reason="shape",
            )
        if not all_finite(delta):
            raise UpdateRefusedError(
                f"{where}: has numbers that are not finite", reason="not finite"
            )
        begin = self._store.numbers(slot, 0).ctypes.data
        offset = delta.ctypes.data - begin
        if not (0 <= offset <= self._store.slot_bytes - delta.nbytes and delta.flags.c_contiguous):
            offset = 0  # the compressor made it elsewhere
            self._store.numbers(slot, self._size)[:] = delta
        return loss_of(words), offset

    def take_sum(self, slot: int, weight: float, updates: int) -> None:
        """The sum of another host has come."""
        key = self._store.publish(
            slot, offset=0, count=self._size, coefficient=1.0, weight=weight, updates=updates
        )
        self._tree.add_sum(key)

    # Workers

    def start(self, row: int) -> None:
        """Start an aggregator."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            arguments = (self._store.file, self._store.slots, self._store.slot_bytes, row)
            process = children.start(
                "shoal.fields.federate.lifl.aggregator",
                *map(str, (*arguments, its.fileno())),
                pass_fds=(self._store.file, its.fileno()),
                stdin=subprocess.DEVNULL,
                env=children.environment({"OMP_NUM_THREADS": "1"}),
            )
        mine.setblocking(False)
        self._processes[row] = process, mine
        asyncio.get_running_loop().add_reader(mine, self._answered, row, mine)

    def send(self, row: int, key: bytes) -> None:
        """Send a key; a worker that is gone is noticed by its closed socket."""
        with contextlib.suppress(OSError):
            self._hop_bytes += self._processes[row][1].send(key)

    def stop(self, row: int) -> None:
        """Let a worker end."""
        process, mine = self._processes.pop(row)
        asyncio.get_running_loop().remove_reader(mine)
        mine.close()
        self._ended.append(process)

    def give_up(self) -> None:
        """Say that nothing is summed here any more."""
        self.say("failed", reason="aggregators end as soon as they are given an update")

    def _answered(self, row: int, mine: socket.socket) -> None:
        try:
            key = mine.recv(64)
        except BlockingIOError:
            return
        except OSError:
            key = b""
        if key:
            self._tree.done(row, key)
            return
        process, _ = self._processes[row]
        self.stop(row)
        children.kill([process])
        self._tree.died(row)

    # The server

    def on_verdict(self, number: int, refused: str | None, key: str) -> None:
        """Whether an update is taken."""
        verdict = self._verdicts.pop(bytes.fromhex(key))
        if not verdict.done():
            verdict.set_result(refused)

    def on_fold(self, key: str, weight: float) -> None:
        """Give an update to an aggregator."""
        self._store.weigh(bytes.fromhex(key), weight)
        self._tree.add(bytes.fromhex(key))

    def on_drop(self, key: str) -> None:
        """Forget an update."""
        self._store.release(bytes.fromhex(key))

    def on_free(self, key: str) -> None:
        """The server has the sum."""
        self._store.release(bytes.fromhex(key))

    def on_flush(self, expected: int, to: str) -> None:
        """Finish the sum, and send it to ``to``, if that is somewhere else."""
        self._tree.flush(expected, not to, functools.partial(self._summed, to))

    def _summed(self, to: str, key: bytes | None) -> None:
        if to and key is not None:
            self._streaming = asyncio.get_running_loop().create_task(self._stream(to, key))
            return
        self.say("total", key=None if key is None else key.hex())

    async def _stream(self, to: str, key: bytes) -> None:
        numbers, _ = self._store.get(key)
        facts = self._store.facts(key)
        url = f"{to}/v1/sums/{facts.weight!r}/{facts.updates}"
        try:
            body = memoryview(numbers.data).cast("B")
            await asyncio.to_thread(post, url, body, self._token, self._certfile)
        except (OSError, FederationError) as cause:
            self.say("failed", reason=f"the sum of a host did not reach {to}: {cause}")
            return
        self._store.release(key)
        self.say("total", key=None)

    def on_facts(self) -> None:
        """Say what was used."""
        rows = self._store.workers
        live = sum(cpu_seconds(process.pid) for process, _ in self._processes.values())
        usage = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        self.say(
            "facts",
            starts=self._tree.starts,
            hops=self._tree.sent,
            hop_bytes=self._hop_bytes,
            workers=self._tree.workers,
            queue=self._tree.queue,
            full=self.full,
            store_bytes=512 * os.fstat(self._store.file).st_blocks,
            up_bytes=self.received,
            objects=int(rows["objects"].sum()),
            busy_s=float(rows["busy_ns"].sum()) / 1e9,
            cpu_s=live + sum(one.ru_utime + one.ru_stime for one in usage),
        )

    async def until_over(self) -> None:
        """End aggregators that are idle until the channel is closed, then all."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 0.5)
            self._tree.stop_idle(time.monotonic())
            self._ended = [one for one in self._ended if one.poll() is None]
        self._server.close()
        children.kill([*(process for process, _ in self._processes.values()), *self._ended])


@dataclass
class _ClientUpdate:
    """A client's update on its way into a slot."""

    gateway: Gateway
    slot: int
    size: int
    name: str
    number: int

    def __post_init__(self) -> None:
        self.room = self.gateway.room(self.slot, self.size)

    async def finish(self) -> Mapping[str, Any]:
        """Hand it over."""
        try:
            await self.gateway.take(self.slot, self.size, self.name, self.number)
        finally:
            self.gateway.let_go(self.name)
        return {}

    def abort(self) -> None:
        """The slot is free again."""
        self.gateway.let_go(self.name)
        self.gateway.give_back(self.slot)


@dataclass
class _Sum:
    """A sum of another host on its way into a slot."""

    gateway: Gateway
    slot: int
    size: int
    weight: float
    updates: int

    def __post_init__(self) -> None:
        self.room = self.gateway.room(self.slot, self.size)

    async def finish(self) -> Mapping[str, Any]:
        """Hand it over."""
        self.gateway.take_sum(self.slot, self.weight, self.updates)
        return {}

    def abort(self) -> None:
        """The slot is free again."""
        self.gateway.give_back(self.slot)


def cpu_seconds(pid: int) -> float:
    """Seconds of processors that a process has used; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    serve(Gateway)
