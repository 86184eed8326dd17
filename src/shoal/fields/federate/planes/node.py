"""An aggregator that takes updates over HTTP: a process that sums what comes.

It is the baseline of the plane LIFL: the same aggregation behind the same receiver, with every
update and every partial sum sent from process to process as the body of a request.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.fields.federate.aggregate.sums import add_weighted
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.planes.direct import LocalSum
from shoal.fields.federate.planes.process import Process, serve
from shoal.fields.federate.protocols import FederationError, LocalJob, Update, UpdateRefusedError
from shoal.fields.federate.wire.bodies import post
from shoal.fields.federate.wire.keys import Keys
from shoal.fields.federate.wire.messages import HEADER_BYTES, loss_of, unpack
from shoal.fields.federate.wire.receive import (
    UPDATE_PATH,
    Answer,
    RequestHead,
    RequestRefusedError,
    Upload,
)


@dataclass
class Received:
    """A body on its way into memory of its own.

    Args:
        size: bytes.
        done: makes the answer of it.
    """

    size: int
    done: Callable[[memoryview], Awaitable[Answer]]

    def __post_init__(self) -> None:
        self.room = memoryview(np.empty(self.size, np.uint8).data)

    async def finish(self) -> Answer:
        """Hand it over."""
        return await self.done(self.room)

    def abort(self) -> None:
        """The memory goes with this object."""


class Node(Process):
    """An aggregator.

    Args:
        given: settings.
        channel: to the server of the federation.
    """

    def __init__(self, given: Mapping[str, Any], channel: socket.socket) -> None:
        self._size: int = given["size"]
        super().__init__(channel, 4 * self._size + HEADER_BYTES)
        self._token: str = given["token"]
        self._fan_in: int = given["fan_in"]
        self._keys = Keys(given["keys"])
        job = FederateJob.model_validate(given["job"])
        self._exchange = Exchange(job, tuple(given["names"]))
        self._check = LocalSum().check
        self._updates: dict[int, Update] = {}
        self._verdicts: dict[int, asyncio.Future[str | None]] = {}
        self._sum = np.empty(self._size, np.float32)
        self._count = 0
        self._up = ""
        self._sending: set[asyncio.Task[None]] = set()

    def accept(self, head: RequestHead) -> Upload:
        """An update of a client, the sum of another node, or a request for this one's.

        Raises:
            RequestRefusedError: it is none of them, too long, or bears the wrong key.
        """
        given = head.headers.get("authorization", "")
        update = UPDATE_PATH.fullmatch(head.path)
        if update and head.method == "POST":
            name, number = update[1], int(update[2])
            if not self._keys.holds(name, given):
                raise RequestRefusedError(401, f"client {name!r}: unknown, or another's key")
            if head.size > self._most:
                raise RequestRefusedError(422, f"update: more than {self._most} bytes")
            return Received(head.size, functools.partial(self._update, name, number))
        if head.path != "/v1/sums" or head.method not in ("GET", "POST"):
            raise RequestRefusedError(404, f"{head.method} {head.path[:80]}: no such thing")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise RequestRefusedError(401, "sums go between nodes and the server")
        if head.method == "GET":
            return Received(0, self._give_sum)
        if head.size != 4 * self._size:
            raise RequestRefusedError(422, f"sum: {head.size} bytes of {4 * self._size}")
        return Received(head.size, self._take_sum)

    async def _update(self, name: str, number: int, body: memoryview) -> Answer:
        self.received += len(body)
        wrong: list[str] = []
        update = Update(number=number, client=name, delta=None)
        try:
            tensors, words = unpack(body)
            job = LocalJob(number=number, client=name, version=0, steps=0, started=0.0)
            delta = self._exchange.decode(job, tensors, self._size)
            update = Update(number=number, client=name, delta=delta, loss=loss_of(words))
            self._check(update, self._size)
        except UpdateRefusedError as cause:
            wrong = [str(cause), cause.reason]
        self._updates[number] = update
        verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._verdicts[number] = verdict
        self.say("arrived", client=name, number=number, loss=update.loss, wrong=wrong)
        refused = await verdict
        if refused is not None:
            self._updates.pop(number, None)
            raise RequestRefusedError(422, refused)
        return {}

    async def _take_sum(self, body: memoryview) -> Answer:
        self._add(np.frombuffer(body, np.float32), 1.0)
        return {}

    async def _give_sum(self, body: memoryview) -> Answer:
        """The sum itself, not a copy: the next one begins in other memory."""
        numbers, self._sum, self._count = self._sum, np.empty(self._size, np.float32), 0
        return numbers.data.cast("B")

    def _add(self, delta: np.ndarray, weight: float) -> None:
        add_weighted(self._sum, [delta], [weight], fresh=self._count == 0, threads=1)
        self._count += 1

    def on_verdict(self, number: int, refused: str | None) -> None:
        """Whether an update is taken."""
        verdict = self._verdicts.pop(number)
        if not verdict.done():
            verdict.set_result(refused)

    def on_up(self, url: str) -> None:
        """Where sums go; empty for the top."""
        self._up = url

    def on_fold(self, number: int, weight: float) -> None:
        """Add an update."""
        self._add(self._updates.pop(number).delta, weight)
        if self._up and self._count == self._fan_in:
            self._send()

    def on_drop(self, number: int) -> None:
        """Forget an update."""
        self._updates.pop(number, None)

    def on_flush(self) -> None:
        """Send what there is upward, and say when all that was sent has been added there."""
        if self._up and self._count:
            self._send()

        async def finish() -> None:
            while self._sending:
                await asyncio.wait(self._sending)
            self.say("total", count=self._count)

        self._finishing = asyncio.create_task(finish())

    def _send(self) -> None:
        """Send the sum upward; the next one begins in other memory."""
        numbers, self._sum, self._count = self._sum, np.empty(self._size, np.float32), 0
        task = asyncio.create_task(self._stream(numbers))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _stream(self, numbers: np.ndarray) -> None:
        try:
            await asyncio.to_thread(post, self._up, numbers.data.cast("B"), self._token)
        except (OSError, FederationError) as cause:
            self.say("failed", reason=f"a sum did not reach {self._up}: {cause}")


if __name__ == "__main__":
    serve(Node)
