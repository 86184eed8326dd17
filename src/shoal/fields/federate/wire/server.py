"""The server of a federation: HTTP routes around a coordinator, in a thread of this process.

Every client has a key of its own, and when it joins gets a session, without which nothing else is
answered: a client that outlived its server, or an earlier life of it, joins again first. A request
for work is held until there is some. All events reach
the coordinator in one thread, which also waits for the scheduler's timers, so none of them is ever
slept through.

When the run is over, every answer is 410.

Routes, below ``/v1/clients/NAME``: ``POST join``, ``GET job``, ``POST updates/NUMBER``,
``POST leave``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shoal.core.errors import ShoalError
from shoal.fields.federate.coordinator import Coordinator
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.protocols import FederationError, LocalJob, Update, UpdateRefusedError
from shoal.fields.federate.wire.bodies import read_body
from shoal.fields.federate.wire.keys import Keys, server_tls
from shoal.fields.federate.wire.messages import HEADER_BYTES, SESSION, loss_of, pack, unpack
from shoal.serve.http.accept import BoundedServer
from shoal.serve.http.limits import HttpLimits

# Seconds for which a request for work is held.
_HELD_S = 20.0
# Seconds in which a request must have come, which on a slow link is a long update.
_READ_S = 300.0
# Examples that a client may say it has: its weight in a mean.
_SAMPLES = 1_000_000_000
# Seconds that the server's thread may take to hear that clients have died, and that clients may
# take to hear that the run is over.
_GONE_S = 30.0


@dataclass
class WireBytes:
    """Bytes of bodies and requests, as the server counts them."""

    up: int = 0
    down: int = 0
    requests: int = 0


@dataclass
class FederationServer:
    """Routes around a coordinator.

    Args:
        coordinator: of the federation; touched by the server's thread only.
        exchange: what updates pass through.
        keys: client -> key.
        finished: whether the run is over; asked after every event.
        description: of the job, for clients that join from elsewhere.
        elsewhere: clients have data of their own, and say how much.
        before_s: what the clock of the run shows when it begins here, s.
        clock: seconds since any moment.

    Attributes:
        bytes: that were sent and received.
        refused: requests that were refused, by reason.
        sessions: of clients that have joined.
    """

    coordinator: Coordinator
    exchange: Exchange
    keys: Mapping[str, str]
    finished: Callable[[], bool]
    description: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: bool = False
    before_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    bytes: WireBytes = field(default_factory=WireBytes)
    refused: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[str, LocalJob] = {}
        self._news = asyncio.Condition()
        self._wake = asyncio.Event()
        self._ended, self._begun = False, 0.0
        # Clients that have joined before the last one did; the clock of the run begins with it.
        self._gathering: set[str] | None = set()
        self._known = Keys(self.keys)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        if self._gathering is not None:
            return self.before_s
        return self.before_s + self.clock() - self._begun

    def gone(self, names: list[str]) -> None:
        """Clients are known to have died; called from another thread."""
        asyncio.run_coroutine_threadsafe(self._gone(names), self._loop).result(_GONE_S)

    def farewell(self) -> None:
        """Wait until every client knows that the run is over; called from another thread."""
        give_up = time.monotonic() + _GONE_S
        while self.sessions and time.monotonic() < give_up:
            time.sleep(0.05)

    def app(self) -> Starlette:
        """The routes."""
        base = "/v1/clients/{name}"
        return Starlette(
            routes=[
                Route(f"{base}/join", self._answered(self._join, joins=True), methods=["POST"]),
                Route(f"{base}/job", self._answered(self._job), methods=["GET"]),
                Route(
                    f"{base}/updates/{{number:int}}", self._answered(self._update), methods=["POST"]
                ),
                Route(f"{base}/leave", self._answered(self._leave), methods=["POST"]),
            ]
        )

    # Routes

    async def _join(self, name: str, request: Request) -> Response:
        if self.elsewhere:
            self.coordinator.introduce(name, await self._samples(request))
        session = self.sessions[name] = secrets.token_hex(8)
        self._ready.pop(name, None)
        if self._gathering is None:
            await self._begin(self.coordinator.join(name, self.now))
        else:
            self._gathering.add(name)
            if len(self._gathering) == len(self.keys):
                names, self._gathering = sorted(self._gathering), None
                self._begun = self.clock()
                for one in names:
                    await self._begin(self.coordinator.join(one, self.now))
        return JSONResponse(
            {
                "parameters": self.coordinator.model.size,
                "session": session,
                "job": dict(self.description),
            }
        )

    async def _samples(self, request: Request) -> int:
        """How many examples a client says that it has."""
        size = request.headers.get("content-length", "")
        body = await request.body() if size.isdecimal() and int(size) < 1000 else b""
        try:
            samples = json.loads(body)["samples"]
        except (ValueError, KeyError, TypeError, RecursionError):
            samples = None
        if type(samples) is not int or not 0 < samples <= _SAMPLES:
            raise FederationError(f"join: samples must be a whole number of 1 to {_SAMPLES:,}")
        return samples

    async def _job(self, name: str, request: Request) -> Response:
        """The client's next job with its model; 204 if there is none yet, 410 when all is over."""
        session = self.sessions[name]

        def news() -> bool:
            return self._ended or name in self._ready or self.sessions.get(name) != session

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HELD_S), self._news:
                await self._news.wait_for(news)
        if self._ended:
            return self._over(name)
        if self.sessions.get(name) != session:
            return self._stranger(name)
        job = self._ready.get(name)
        if job is None:
            return Response(status_code=204)
        base = self.coordinator.base(job)
        # Where nothing is learned, no model is needed.
        sent = {"model": base if job.steps else base[:0], **self.exchange.attach(job)}
        body = pack(sent, asdict(job) | {"address": self.coordinator.plane.address(job)})
        self.bytes.down += len(body)
        return Response(body, media_type="application/octet-stream")

    async def _update(self, name: str, request: Request) -> Response:
        """An update; one that is not taken ends its job, and the client joins again."""

        async def read(job: LocalJob) -> Update:
            body = await read_body(request, 4 * self.coordinator.model.size + HEADER_BYTES)
            tensors, words = unpack(body)
            self.bytes.up += len(body)
            delta = self.exchange.decode(job, tensors, self.coordinator.model.size)
            return Update(number=job.number, client=name, delta=delta, loss=loss_of(words))

        await self._settle(name, request.path_params["number"], read)
        return JSONResponse({})

    async def _settle(
        self, name: str, number: int, read: Callable[[LocalJob], Awaitable[Update]]
    ) -> None:
        """Hand an update on; one that is wrong ends its job.

        Raises:
            UpdateRefusedError: it is wrong, or answers no job.
        """
        job = self.coordinator.check(name, number)
        try:
            begun = self.coordinator.update(await read(job), self.now)
        except UpdateRefusedError as cause:
            if self.coordinator.jobs.get(number) is not None:
                self._forget(name)
                await self._begin(self.coordinator.refuse(name, cause, self.now))
            raise
        self._ready.pop(name, None)
        await self._begin(begun)

    def arrived(self, update: Update) -> Future[str | None]:
        """An update is somewhere in the plane; for any thread.

        Returns:
            Why it is refused; None if it is taken.
        """

        async def read(job: LocalJob) -> Update:
            return update

        async def take() -> str | None:
            if self._ended:
                return "the run is over"
            try:
                await self._settle(update.client, update.number, read)
            except UpdateRefusedError as cause:
                self.refused[cause.reason] = self.refused.get(cause.reason, 0) + 1
                return str(cause)
            except FederationError as cause:
                return str(cause)
            return None

        return asyncio.run_coroutine_threadsafe(take(), self._loop)

    async def _leave(self, name: str, request: Request) -> Response:
        await self._gone([name])
        return JSONResponse({})

    async def _gone(self, names: list[str]) -> None:
        for name in names if not self._ended else []:
            self._forget(name)
            if self._gathering is not None:
                self._gathering.discard(name)
            else:
                await self._begin(self.coordinator.leave(name, self.now))

    def _forget(self, name: str) -> None:
        """Let go of a client's session and of the job that it was to have."""
        self._ready.pop(name, None)
        self.sessions.pop(name, None)

    # Around them

    def _answered(self, route: Callable[..., Any], joins: bool = False) -> Callable[..., Any]:
        """A route behind key and session; what is wrong with a request is its answer."""

        async def answer(request: Request) -> Response:
            self.bytes.requests += 1
            name = request.path_params["name"]
            if not self._known.holds(name, request.headers.get("authorization", "")):
                return self._refuse(401, "key", f"client {name!r}: unknown, or another's key")
            if self._ended:
                return self._over(name)
            session = self.sessions.get(name)
            if not joins and (session is None or request.headers.get(SESSION) != session):
                return self._stranger(name)
            try:
                response: Response = await route(name, request)
            except UpdateRefusedError as cause:
                return self._refuse(422, cause.reason, str(cause))
            except FederationError as cause:
                return self._refuse(409, "state", str(cause))
            except ClientDisconnect:
                return Response(status_code=499)
            return response

        return answer

    def _over(self, name: str) -> Response:
        self.sessions.pop(name, None)
        return Response(status_code=410)

    def _stranger(self, name: str) -> Response:
        text = f"client {name!r}: has not joined, or has joined again since; join first"
        return self._refuse(412, "session", text)

    def _refuse(self, status: int, reason: str, text: str) -> Response:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        return JSONResponse({"error": text}, status_code=status)

    async def _begin(self, jobs: list[LocalJob]) -> None:
        """Let clients have their jobs."""
        async with self._news:
            for job in jobs:
                if job.number in self.coordinator.jobs:
                    self._ready[job.client] = job
            self._ended = self._ended or self.finished()
            self._news.notify_all()
        self._wake.set()

    async def keep_time(self) -> None:
        """Wait for the scheduler's timers, until the run is over."""
        while not self._ended:
            at = self.coordinator.next_timer()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake.wait(), 0.5 if at is None else min(max(at - self.now, 0), 0.5)
                )
            if self._gathering is None:
                try:
                    begun = self.coordinator.due(self.now)
                except ShoalError as cause:  # without timers, clients would wait for ever
                    self.coordinator.failed, begun = str(cause), []
                await self._begin(begun)


@contextlib.contextmanager
def listening(
    make: Callable[[], FederationServer],
    host: str = "127.0.0.1",
    port: int = 0,
    certfile: str = "",
    keyfile: str = "",
) -> Iterator[tuple[FederationServer, str]]:
    """A server in a thread of this process, and its address, as long as the block takes.

    Args:
        make: makes it; called in its thread, where its loop runs.
        host: address on which it listens.
        port: on which it listens; 0 for any.
        certfile: certificate for TLS; empty for plain HTTP.
        keyfile: its key.

    Raises:
        ShoalError: it does not start.
    """
    if certfile:
        server_tls(certfile, keyfile)  # what is wrong with them is said here
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as cause:
        raise FederationError(
            f"listen: {host}:{port} cannot be had ({cause.strerror or cause}); choose another port"
        ) from cause
    # Inherited by its connections: asyncio sets it only where the protocol is named, and without
    # it the body of every answer waits 40 ms for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    known, halt = threading.Event(), []
    made: list[FederationServer] = []
    failed: list[BaseException] = []

    async def serve() -> None:
        import uvicorn

        server = make()
        config = uvicorn.Config(
            server.app(), lifespan="off", log_config=None, access_log=False, server_header=False,
            ssl_certfile=certfile or None, ssl_keyfile=keyfile or None,
        )  # fmt: skip
        http = BoundedServer(config, limits=HttpLimits(read_s=_READ_S))
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(setattr, http, "should_exit", True)

        halt.append(stop)
        made.append(server)
        known.set()
        clock = asyncio.create_task(server.keep_time())
        await http.serve(sockets=[listener])
        clock.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await clock

    def work() -> None:
        try:
            asyncio.run(serve())
        except BaseException as cause:  # handed to the thread that waits
            failed.append(cause)
        finally:
            known.set()

    thread = threading.Thread(target=work, name="shoal-federation", daemon=True)
    thread.start()
    try:
        known.wait()
        if not made:
            thread.join()
            raise failed[0]
        scheme = "https" if certfile else "http"
        here = f"[{host}]" if ":" in host else host
        yield made[0], f"{scheme}://{here}:{listener.getsockname()[1]}"
    finally:
        for stop in halt:
            stop()
        thread.join()
    if failed:
        raise failed[0] if isinstance(failed[0], ShoalError) else FederationError(str(failed[0]))
