"""The HTTP process's side of the engine: starts it, feeds it, and starts it again.

Requests become streams of outputs. A stream always ends: with the request's last output,
or with an error when the request is refused, its reader is too slow, or the engine dies or
hangs. After a death the engine is started again, later after each failure in a row; what
is asked meanwhile is refused at once with the time to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from shoal.core.errors import ServeError, require
from shoal.ir.serve_job import ServeJob
from shoal.ir.serving import Output, Request
from shoal.serve.engine.crashes import CrashHistory
from shoal.serve.engine.failure import (
    ENDS,
    EngineDownError,
    RefusedError,
    RequestFailedError,
    SlowReaderError,
)
from shoal.serve.engine.frames import DEFAULT_FACTORY
from shoal.serve.engine.hooks import ClientHook, EngineHooks
from shoal.serve.engine.launch import EngineProcess, launch
from shoal.serve.engine.link import EngineLink, ModelInfo, connect
from shoal.serve.engine.output_queue import Listener, OutputQueue
from shoal.serve.engine.wire import pack_request, unpack_output
from shoal.serve.http.client_options import ClientOptions

__all__ = [
    "ClientOptions",
    "EngineClient",
    "EngineDownError",
    "ModelInfo",
    "RefusedError",
    "RequestFailedError",
    "SlowReaderError",
]

log = logging.getLogger("shoal.serve")

# An engine that ran so long, or answered a request, has not failed "again".
_STEADY_S = 60.0


class EngineClient:
    """Streams of outputs from an engine in a separate process.

    Args:
        job: what to serve.
        factory: ``module:function`` that builds the engine from the job, in its process.
        options: how patient to be.
        launched: a process that was started already.

    Attributes:
        job: what the engine is started with the next time.
        hooks: of techniques that act in this process.
        restarts: how often the engine was started again.
        last_stats: counters that the engine reported last.
    """

    def __init__(
        self,
        job: ServeJob,
        *,
        factory: str = DEFAULT_FACTORY,
        options: ClientOptions | None = None,
        launched: EngineProcess | None = None,
    ) -> None:
        self.job, self._factory = job, factory
        self._options = options or ClientOptions()
        self._launched = launched
        self._link: EngineLink | None = None
        self._streams: dict[str, OutputQueue] = {}
        self.hooks: EngineHooks[ClientHook] = EngineHooks([CrashHistory()])
        self._supervisor: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self._reason = ""
        self._retry_at = 0.0
        self.restarts = 0
        self.last_stats: dict[str, float] = {}

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self._link is not None

    @property
    def model(self) -> ModelInfo:
        """What the engine said about its model when it last started."""
        if self._info is None:
            raise EngineDownError("the engine has not started yet")
        return self._info

    @property
    def pid(self) -> int | None:
        """Process of the engine, if one runs."""
        return self._link.launched.process.pid if self._link is not None else None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def generate(
        self, request: Request, on: Mapping[str, Listener] | None = None
    ) -> AsyncIterator[Output]:
        """Outputs of a request one by one; see :meth:`batches`."""
        async with contextlib.aclosing(self.batches(request, on)) as batches:
            async for batch in batches:
                for output in batch:
                    yield output

    # The life of a request

    async def batches(
        self, request: Request, on: Mapping[str, Listener] | None = None
    ) -> AsyncGenerator[list[Output], None]:
        """All outputs that are there, as soon as there is one; leaving early aborts.

        Args:
            request: its id is that of no open request.
            on: receives other messages about it: ``began`` (at: s on the monotonic clock,
                when its first step began; engines of several processes do not report it) and
                ``vector`` (values: of its prompt).

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
            RefusedError: the engine can never run this request.
            RequestFailedError: the engine failed on this request, or died of it twice.
            SlowReaderError: the outputs were not taken in time.
        """
        stream = self._open(request, on or {})
        try:
            finished = False
            while not finished:
                batch = await stream.take()
                finished = batch[-1].finish is not None
                yield batch
        finally:
            if self._streams.get(request.id) is stream:
                self.abort(request.id)

    def _open(self, request: Request, on: Mapping[str, Listener]) -> OutputQueue:
        """Send a request to the engine."""
        link = self._alive()
        require(
            request.id not in self._streams,
            "request id",
            request.id,
            expected="an id that no open request has",
            error=ServeError,
        )
        self.hooks(ClientHook.opening, request)
        link.send("add", **pack_request(request))
        stream = self._streams[request.id] = OutputQueue(request, on)
        return stream

    def _route(self, message: Mapping[str, Any]) -> None:
        """Take in a message of the engine."""
        kind = message["kind"]
        if kind == "outputs":
            for raw in message["outputs"]:
                self._put(unpack_output(raw))
        elif kind in ENDS:
            self._fail(message["id"], ENDS[kind](message["message"]))
        elif kind == "pong":
            self.last_stats = message["stats"]
        else:
            for request_id in message.get("ids", [message.get("id")]):
                stream = self._streams.get(request_id)
                if stream is not None and kind in stream.on:
                    stream.on[kind](message)

    def _put(self, output: Output) -> None:
        if self._link is not None and output.finish is not None:
            self._link.answered = True
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # it was aborted while this was under way
        unread, most = stream.put(output), self._options.max_queued
        if stream.ended:
            del self._streams[output.request_id]
            self.hooks(ClientHook.answered, stream.request)
        elif unread > most:
            cause = (
                f"more than {most} outputs were not read, so the request was aborted; read faster "
                "or ask for fewer tokens"
            )
            self.abort(output.request_id, SlowReaderError(cause))

    def _fail(self, request_id: str, error: ServeError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)

    def abort(self, request_id: str, error: ServeError | None = None) -> None:
        """Forget a request, here and in the engine; nothing happens if it is gone already."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        result = stream.ended
        self._fail(request_id, error or ServeError("the request was aborted"))
        if not result and self._link is not None:
            self._link.send("abort", id=request_id)

    def end_all(self, reason: str | EngineDownError) -> None:
        """End every open stream with an error; the engine is not informed."""
        error = EngineDownError(reason) if isinstance(reason, str) else reason
        for request_id in list(self._streams):
            self._fail(request_id, error)

    # Questions

    async def embed(self, request: Request) -> list[float]:
        """The vector of a text, by ``params.pooling``; leaving early aborts.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
            RefusedError: the engine can never run this request.
            ServeError: the engine gives no vectors.
        """
        vectors: list[list[float]] = []
        on = {"vector": lambda message: vectors.append(message["values"])}
        async with contextlib.aclosing(self.batches(request, on)) as batches:
            await anext(batches)
        if not vectors:
            raise ServeError("this engine gives no vectors of texts")
        return vectors[0]

    async def ask(self, what: str, *, otherwise: Any, **words: Any) -> Any:
        """The engine's answer to a question, which it gives between two steps.

        Args:
            what: of the engine's ``answers``.
            otherwise: the answer of an engine that does not know the question.
            **words: of the question.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
        """
        link = self._alive()
        try:
            return (await link.ask("ask", what=what, words=words)).get("answer", otherwise)
        except asyncio.CancelledError:
            if self._link is link:
                raise  # the caller has gone
            raise EngineDownError(self._reason or "the engine died") from None

    async def stats(self, timeout_s: float = 1.0) -> dict[str, float]:
        """Counters of the engine; the last reported ones while it is busy with a long step.

        Raises:
            EngineDownError: the engine is not there.
        """
        link = self._alive()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(link.ask("ping")), timeout_s)
        return self.last_stats

    def _alive(self) -> EngineLink:
        if self._link is None:
            wait_s = max(1.0, self._retry_at - time.monotonic())
            raise EngineDownError(
                f"the engine is not running ({self._reason or 'it is starting'}); "
                "it is being started again",
                wait_s,
            )
        return self._link

    # The life of the engine

    async def start(self) -> ModelInfo:
        """Start the engine and wait until it can answer.

        Raises:
            ServeError: it cannot load the model, died, or took longer than ``start_s``.
        """
        await self._connect()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        return self.model

    async def stop(self) -> None:
        """End the engine's process and every open stream."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self.end_all("the server is stopping")
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        if self._launched is not None:
            self._launched.discard()
            self._launched = None

    async def _connect(self) -> None:
        launched = self._launched = self._launched or launch(self.job, self._factory)
        try:
            self._link, self._info = await connect(launched, self._options.start_s)
        finally:
            self._launched = None

    async def _supervise(self) -> None:
        failures = 0
        while True:
            link = self._link
            if link is not None:
                began = time.monotonic()
                self._reason = await link.run(self._route, self._options)
                self._link = None
                steady = link.answered or time.monotonic() - began > _STEADY_S
                failures = 0 if steady else failures
            pause = self._pause(failures)
            if link is not None:
                log.error("%s; it starts again in %.1f s", self._reason, pause)
                open_ones = [one.request for one in self._streams.values() if not one.ended]
                self.hooks(ClientHook.lost, open_ones, self.restarts)
                which = str(self.restarts)
                self.end_all(EngineDownError(self._reason, max(1.0, pause), met=which))
                await link.close()
            await asyncio.sleep(pause)
            failures += 1
            self.restarts += 1
            try:
                await self._connect()
            except (ServeError, OSError) as cause:
                self._reason = f"the engine did not start again: {cause}"
                log.error("%s", self._reason)
            else:
                log.warning("the engine runs again")

    def _pause(self, failures: int) -> float:
        most = self._options.max_backoff_s
        pause = min(most, self._options.backoff_s * 2.0 ** min(failures, 30))
        self._retry_at = time.monotonic() + pause
        return pause
