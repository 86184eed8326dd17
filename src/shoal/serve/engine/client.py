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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ServeError, require
from shoal.ir.serve_job import ServeJob
from shoal.ir.serving import Output, SamplingParams
from shoal.serve.engine.deaths import Deaths, key_of
from shoal.serve.engine.failure import RequestFailedError
from shoal.serve.engine.launched import Launched, Words, launch
from shoal.serve.engine.process import DEFAULT_FACTORY
from shoal.serve.engine.unread import Unread
from shoal.serve.engine.wire import Decoder, encode, pack_params, unpack_output
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

_READ_BYTES = 2**18
# An engine that ran so long, or answered a request, has not failed "again".
_STEADY_S = 60.0


class EngineDownError(ServeError):
    """The engine is starting, has died or hangs.

    Args:
        message: what happened.
        retry_after_s: s after which to try again.
        met: names the death, where it died while it answered this request.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0, *, met: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.met = met


class RefusedError(ServeError):
    """A request that the engine can never run."""


class SlowReaderError(ServeError):
    """A stream whose reader does not keep up; its request was aborted."""


@dataclass(frozen=True)
class ModelInfo:
    """What the engine says about its model.

    Args:
        vocab_size: token ids are below it.
        max_position: most tokens of a request, prompt and output.
        eos_ids: tokens that end a text.
        workers: most concurrent workers of a request, and those of one that does not say.
        streams: parallel streams of the model, of which a request may ask for fewer.
        shares: a request may take a share of the model.
    """

    vocab_size: int
    max_position: int
    eos_ids: frozenset[int]
    workers: int = 1
    streams: int = 1
    shares: bool = False


class _Link:
    """A connected engine process."""

    def __init__(
        self,
        launched: Launched,
        words: Words,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.launched = launched
        self.words = words
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder()
        self.answered = False
        self.asked: dict[int, tuple[float, asyncio.Future[dict[str, float]]]] = {}
        self.questions: dict[int, asyncio.Future[Any]] = {}


class EngineClient:
    """Streams of outputs from an engine in a process of its own.

    Args:
        job: what to serve.
        factory: ``module:function`` that builds the engine from the job, in its process.
        options: how patient to be.
        launched: a process that was started already.
    """

    def __init__(
        self,
        job: ServeJob,
        *,
        factory: str = DEFAULT_FACTORY,
        options: ClientOptions | None = None,
        launched: Launched | None = None,
    ) -> None:
        self._job = job
        self._factory = factory
        self._options = options or ClientOptions()
        self._launched = launched
        self._link: _Link | None = None
        self._streams: dict[str, Unread] = {}
        self._deaths = Deaths()
        self._supervisor: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self._next_ping = 0
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
        """What the engine said about its model when it first started."""
        if self._info is None:
            raise EngineDownError("the engine has not started yet")
        return self._info

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return tuple(self._job.adapters)

    async def change_adapter(self, what: str, name: str, path: str = "") -> None:
        """Load an adapter, unload, merge or unmerge it.

        A restarted engine has what was loaded, and nothing merged.

        Args:
            what: ``load``, ``unload``, ``merge`` or ``unmerge``.
            name: of the adapter.
            path: where it lies, to load it.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
            RefusedError: the engine cannot; says why.
        """
        error = await self._ask({"kind": "adapter", "do": what, "name": name, "path": path})
        if error is not None:
            raise RefusedError(error)
        if what not in ("load", "unload"):
            return
        kept = {key: value for key, value in self._job.adapters.items() if key != name}
        if what == "load":
            kept[name] = path
        room = self._job.room_for_adapters
        self._job = self._job.model_copy(update={"adapters": kept, "max_adapters": room})

    async def views(self) -> list[dict[str, Any]]:
        """What concurrent workers see now, by request; see ``views`` of the engine that has them.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
        """
        found: list[dict[str, Any]] = await self._ask({"kind": "views"})
        return found

    async def _ask(self, message: Mapping[str, Any]) -> Any:
        """The engine's answer to a question, which it gives between two steps."""
        link = self._alive()
        self._next_ping += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        link.questions[self._next_ping] = answer
        link.writer.write(encode({**message, "number": self._next_ping}))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._link is link:
                raise  # whoever asked has gone
            raise EngineDownError(self._reason or "the engine died") from None

    @property
    def pid(self) -> int | None:
        """Process of the engine, if one runs."""
        return self._link.launched.process.pid if self._link is not None else None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def start(self) -> ModelInfo:
        """Start the engine and wait until it can answer.

        Raises:
            ServeError: it cannot load the model, died, or took longer than ``start_s``.
        """
        self._link = await self._connect()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        return self.model

    def end_all(self, reason: str) -> None:
        """End every open stream with an error; their requests are not told to the engine."""
        self._fail_streams(EngineDownError(reason))

    async def stop(self) -> None:
        """End the engine's process and every open stream."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self.end_all("the server is stopping")
        if self._link is not None:
            await self._disconnect(self._link)
        if self._launched is not None:
            self._launched.discard()
            self._launched = None

    async def generate(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: float = 0.0,
        adapter: str | None = None,
        salt: str = "",
    ) -> AsyncIterator[Output]:
        """Outputs of a request one by one; see :meth:`batches`."""
        batches = self.batches(
            request_id, tokens, params, priority=priority, adapter=adapter, salt=salt
        )
        async with contextlib.aclosing(batches):
            async for batch in batches:
                for output in batch:
                    yield output

    async def batches(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: float = 0.0,
        adapter: str | None = None,
        salt: str = "",
        fork_of: str | None = None,
        began: Callable[[float], None] | None = None,
    ) -> AsyncGenerator[list[Output], None]:
        """All outputs that are there, as soon as there is one; leaving early aborts.

        ``began`` is called with when its first step began, s on the monotonic clock; engines
        of several processes do not tell.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
            RefusedError: the engine can never run this request.
            RequestFailedError: the engine failed on this request, or died of it twice.
            SlowReaderError: the outputs were not taken in time.
        """
        stream = self._open(request_id, tokens, params, priority, adapter, salt, fork_of, began)
        try:
            finished = False
            while not finished:
                batch = await stream.take()
                finished = batch[-1].finish is not None
                yield batch
        finally:
            if self._streams.get(request_id) is stream:
                self.abort(request_id)

    async def embed(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        priority: float = 0.0,
        salt: str = "",
    ) -> list[float]:
        """The vector of a text, by ``params.pooling``; leaving early aborts.

        Raises:
            EngineDownError: the engine is not there, or died meanwhile.
            RefusedError: the engine can never run this request.
            ServeError: the engine gives no vectors.
        """
        stream = self._open(request_id, tokens, params, priority, None, salt)
        try:
            await stream.take()
        finally:
            if self._streams.get(request_id) is stream:
                self.abort(request_id)
        if stream.vector is None:
            raise ServeError("this engine gives no vectors of texts")
        return stream.vector

    def _open(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        priority: float,
        adapter: str | None,
        salt: str,
        fork_of: str | None = None,
        began: Callable[[float], None] | None = None,
    ) -> Unread:
        """Send a request to the engine."""
        link = self._alive()
        require(
            request_id not in self._streams,
            "request id",
            request_id,
            expected="an id that no open request has",
            error=ServeError,
        )
        stream = Unread(began, (tokens, params, adapter))
        if self._deaths:
            self._deaths.check(key_of(*stream.asked))
        message = {
            "kind": "add",
            "id": request_id,
            "tokens": list(tokens),
            "params": pack_params(params),
            "priority": priority,
            "adapter": adapter,
            "salt": salt,
            "fork_of": fork_of,
        }
        link.writer.write(encode(message))
        self._streams[request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """Forget a request, here and in the engine; nothing happens if it is gone already."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        told = stream.ended
        stream.fail(ServeError("the request was aborted"))
        if not told and self._link is not None:
            self._link.writer.write(encode({"kind": "abort", "id": request_id}))

    async def stats(self, timeout_s: float = 1.0) -> dict[str, float]:
        """Counters of the engine; those it told last while it is busy with a long step.

        Raises:
            EngineDownError: the engine is not there.
        """
        link = self._alive()
        try:
            return await asyncio.wait_for(asyncio.shield(self._ping(link)), timeout_s)
        except TimeoutError:
            return self.last_stats

    def _alive(self) -> _Link:
        if self._link is None:
            wait_s = max(1.0, self._retry_at - time.monotonic())
            raise EngineDownError(
                f"the engine is not running ({self._reason or 'it is starting'}); "
                "it is being started again",
                wait_s,
            )
        return self._link

    # Starting

    async def _connect(self) -> _Link:
        launched = self._launched or launch(self._job, self._factory)
        self._launched = launched
        words = Words(launched.process)
        try:
            async with asyncio.timeout(self._options.start_s):
                link = await self._shake_hands(launched, words)
        except BaseException as cause:
            launched.process.kill()
            await words.finish()
            self._launched = None
            await asyncio.to_thread(launched.discard)
            if isinstance(cause, TimeoutError):
                raise ServeError(
                    f"the engine did not load its model within {self._options.start_s:g} s; "
                    f"allow more with --start-timeout{words.last}"
                ) from None
            raise
        self._launched = None
        return link

    async def _shake_hands(self, launched: Launched, words: Words) -> _Link:
        reader, writer = await asyncio.open_unix_connection(sock=launched.socket, limit=_READ_BYTES)
        link = _Link(launched, words, reader, writer)
        try:
            while True:
                try:
                    data = await reader.read(_READ_BYTES)
                except ConnectionResetError:  # it has not even read what it is to load
                    data = b""
                if not data:
                    launched.process.kill()
                    await words.finish()
                    raise ServeError(f"the engine died while it loaded{words.last}")
                for message in link.decoder.feed(data):
                    if message["kind"] == "failed":
                        raise ServeError(message["message"])
                    self._info = ModelInfo(
                        message["vocab_size"],
                        message["max_position"],
                        frozenset(message["eos_ids"]),
                        message.get("workers", 1),
                        streams=message.get("streams", 1),
                        shares=message.get("shares", False),
                    )
                    return link
        except BaseException:
            writer.close()
            raise

    # Running

    async def _supervise(self) -> None:
        failures = 0
        while True:
            if self._link is not None:
                began = time.monotonic()
                self._reason = await self._run(self._link)
                link, self._link = self._link, None
                steady = link.answered or time.monotonic() - began > _STEADY_S
                failures = 0 if steady else failures
                pause = self._pause(failures)
                log.error("%s; it starts again in %.1f s", self._reason, pause)
                open_ones = [one.asked for one in self._streams.values() if not one.ended]
                self._deaths.died((key_of(*asked) for asked in open_ones), self.restarts)
                which = str(self.restarts)
                self._fail_streams(EngineDownError(self._reason, max(1.0, pause), met=which))
                await self._disconnect(link)
            else:
                pause = self._pause(failures)
            await asyncio.sleep(pause)
            failures += 1
            self.restarts += 1
            try:
                self._link = await self._connect()
            except (ServeError, OSError) as cause:
                self._reason = f"the engine did not start again: {cause}"
                log.error("%s", self._reason)
            else:
                log.warning("the engine runs again")

    def _pause(self, failures: int) -> float:
        pause: float = min(
            self._options.max_backoff_s, self._options.backoff_s * 2.0 ** min(failures, 30)
        )
        self._retry_at = time.monotonic() + pause
        return pause

    async def _run(self, link: _Link) -> str:
        """Route what the engine sends until it is gone; returns what happened to it."""
        reading = asyncio.create_task(self._read(link), name="engine reader")
        watching = asyncio.create_task(self._watch(link), name="engine watch")
        try:
            done, _ = await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            reading.cancel()
            watching.cancel()

    async def _read(self, link: _Link) -> str:
        try:
            while data := await link.reader.read(_READ_BYTES):
                for message in link.decoder.feed(data):
                    if message["kind"] == "failed":
                        return f"the engine failed: {message['message']}"
                    self._route(link, message)
        except (OSError, ServeError) as cause:
            return f"the connection to the engine broke: {cause}"
        return "the engine died"

    async def _watch(self, link: _Link) -> str:
        while True:
            asked_at = time.monotonic()
            answer = self._ping(link)
            done, _ = await asyncio.wait([answer], timeout=self._options.hang_s)
            if not done:
                return (
                    f"the engine hangs: no answer for {time.monotonic() - asked_at:.0f} s, "
                    "so it was killed"
                )
            await asyncio.sleep(self._options.ping_s)

    def _ping(self, link: _Link) -> asyncio.Future[dict[str, float]]:
        self._next_ping += 1
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        link.asked[self._next_ping] = (time.monotonic(), answer)
        link.writer.write(encode({"kind": "ping", "number": self._next_ping}))
        return answer

    def _route(self, link: _Link, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "outputs":
            for raw in message["outputs"]:
                output = unpack_output(raw)
                link.answered = link.answered or output.finish is not None
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue  # it was aborted while this was under way
                if stream.put(output) > self._options.max_unread and not stream.ended:
                    self._drop(output.request_id, stream)
                elif stream.ended:
                    del self._streams[output.request_id]
                    if self._deaths:
                        self._deaths.served(key_of(*stream.asked))
        elif kind == "began":
            for request_id in message["ids"]:
                stream = self._streams.get(request_id)
                if stream is not None and stream.began is not None:
                    stream.began(message["at"])
        elif kind == "vector":
            stream = self._streams.get(message["id"])
            if stream is not None:
                stream.vector = message["values"]
        elif kind == "refused":
            stream = self._streams.pop(message["id"], None)
            if stream is not None:
                stream.fail(RefusedError(message["message"]))
        elif kind == "error":
            stream = self._streams.pop(message["id"], None)
            if stream is not None:
                stream.fail(RequestFailedError(message["message"]))
        elif kind == "answer":
            waiting = link.questions.pop(message["number"])
            if not waiting.done():
                waiting.set_result(message["answer"])
        elif kind == "pong":
            self.last_stats = message["stats"]
            _, answer = link.asked.pop(message["number"])
            if not answer.done():
                answer.set_result(message["stats"])

    def _drop(self, request_id: str, stream: Unread) -> None:
        del self._streams[request_id]
        stream.fail(
            SlowReaderError(
                f"more than {self._options.max_unread} outputs were not read, so the request was "
                "aborted; read faster or ask for fewer tokens"
            )
        )
        if self._link is not None:
            self._link.writer.write(encode({"kind": "abort", "id": request_id}))

    def _fail_streams(self, error: ServeError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    async def _disconnect(self, link: _Link) -> None:
        self._link = None if self._link is link else self._link
        link.writer.close()
        for _, answer in link.asked.values():
            answer.cancel()
        for waiting in link.questions.values():
            waiting.cancel()
        link.launched.process.kill()
        await link.words.finish()
        await asyncio.to_thread(link.launched.discard)
