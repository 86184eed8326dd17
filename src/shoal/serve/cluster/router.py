"""The HTTP application in front of several replicas: chooses one for each request.

Every endpoint of :mod:`shoal.serve.http.api` is passed on; ``/health`` and ``/metrics`` are of all
replicas together. A request whose replica dies, is full or is being started again goes to
another one, up to ``attempts`` times in all: nothing was kept of it, so that asking twice does
no harm. A stream that has begun goes on elsewhere where that can be done without a seam
(:mod:`shoal.serve.cluster.resume`), and ends with one error event otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from shoal.core.errors import ServeError
from shoal.core.version import __version__
from shoal.plan.balance.replicas.protocols import Balancer
from shoal.serve.cluster.replicas import Replica, Replicas
from shoal.serve.cluster.resume import (
    DONE,
    DivergedError,
    Progress,
    is_last,
    resumable,
    split_events,
    type_of,
)
from shoal.serve.cluster.router_metrics import RouterMetrics
from shoal.serve.cluster.upstream import ServerLostError, UpstreamResponse
from shoal.serve.engine.crashes import CrashHistory
from shoal.serve.engine.failure import RequestFailedError
from shoal.serve.http.api import ROUTES, protect
from shoal.serve.http.body import parsed, read_bytes
from shoal.serve.http.draining import DrainState
from shoal.serve.http.errors import DIED, ApiError, as_api_error, error_body
from shoal.serve.http.guard import AccessControl
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openapi import document
from shoal.serve.http.stream import EventStream, until_gone
from shoal.serve.http.unknown import UnknownFields

# Tries of a request; fewer where engines die of it, see shoal.serve.engine.crashes.
_ATTEMPTS = 3
# s to wait for a replica when none takes requests, and between two looks.
_PATIENCE_S = 10.0
_LOOK_S = 0.02

_TYPED = "/v1/responses"  # whose events have types, and say which is the last
_STREAMS = ("/v1/completions", "/v1/chat/completions", _TYPED)
_PASSED_ON = ("content-type", "retry-after", "cache-control")
_BUSY = (429, 503)
# In the error event of a stream whose engine died.
_DIED = b'"engine_unavailable"'
# Headers that trace a request across programs.
_TRACE = ("traceparent", "tracestate")


def prompt_of(body: Mapping[str, Any]) -> tuple[str | Sequence[int], str]:
    """What of a request decides which cache it fits: its prompt, and its salt.

    Whatever is no prompt counts as an empty one; the replica will say what is wrong with it.
    """
    given = body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        given = given[0]  # of several prompts, the first
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [messages]
    if isinstance(messages, list):
        # The template comes with the model. Alike beginnings of chats are alike here, too.
        given = json.dumps([body.get("tools"), body.get("instructions"), *messages])
    salt = body.get("cache_salt")
    if isinstance(given, list) and not all(type(token) is int for token in given):
        given = ""
    known = given if isinstance(given, (str, list)) else ""
    return known, salt if isinstance(salt, str) else ""


@dataclass
class _Asked:
    """A request that is passed on.

    Args:
        method: of HTTP.
        target: path and query.
        headers: of the replica's request.
        body: its bytes.
        prompt: what decides where it goes.
        salt: the same.
        key: the same for the retries of a client.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""
    prompt: str | Sequence[int] = ""
    salt: str = ""
    key: bytes = b""


def create_router(
    replicas: Replicas,
    balancer: Balancer,
    *,
    name: str,
    access: AccessControl | None = None,
    limits: HttpLimits | None = None,
    drain: DrainState | None = None,
) -> FastAPI:
    """The application.

    Args:
        replicas: started.
        balancer: which of them answers.
        name: what the model is called in requests.
        access: who may call.
        limits: what a request may ask for; answers under way are those of one replica.
        drain: closed while the server drains.
    """
    limits = limits or HttpLimits()
    metrics = RouterMetrics(replicas, name)
    router = _Router(replicas, balancer, name, limits, metrics)
    app = FastAPI(
        title="Shoal", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    own = {
        "/health": router.health,
        "/metrics": router.metrics_text,
        "/openapi.json": router.openapi,
    }
    for method, path in ROUTES:
        handler = own.get(path, router.read if method == "GET" else router.write)
        app.add_api_route(path, handler, methods=[method], response_model=None)
    replicas.on_gone = balancer.forget
    app.state.stop = _nothing
    protect(app, metrics.http, access=access, limits=limits, drain=drain)
    return app


async def _nothing() -> None:
    """Nothing was started for requests."""


class _Router:
    """The handlers of the routes."""

    def __init__(
        self,
        replicas: Replicas,
        balancer: Balancer,
        name: str,
        limits: HttpLimits,
        metrics: RouterMetrics,
    ) -> None:
        self._replicas = replicas
        self._balancer = balancer
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._deaths = CrashHistory()
        self._unknown = UnknownFields(limits)

    async def health(self) -> Response:
        """200 while any replica takes requests."""
        ready, number = len(self._replicas.ready), len(self._replicas.all)
        if not ready:
            raise _none_ready(number)
        return JSONResponse({"status": "ok", "replicas": number, "ready": ready})

    async def metrics_text(self) -> Response:
        """Numbers of all replicas, each with its number, and of the router."""
        text = await self._metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self) -> Response:
        """What can be asked, for programs."""
        return JSONResponse(document(ROUTES, self._limits, self._name))

    async def read(self, request: Request) -> Response:
        """Pass on a request that any replica can answer."""
        target = request.scope["raw_path"].decode("latin-1")
        result = _Asked("GET", target, _headers(request))
        return await until_gone(request.receive, self._whole(result))

    async def write(self, request: Request) -> Response:
        """Pass on a request with a body."""
        data = await read_bytes(request, self._limits)
        key = hashlib.blake2b(request.url.path.encode() + data, digest_size=16).digest()
        body = await parsed(data, self._limits)
        self._unknown.note(request, body)
        path = request.url.path
        # Only these leave something in a cache, or find it there.
        prompt, salt = prompt_of(body) if path in _STREAMS else ("", "")
        stream = path in _STREAMS and body.get("stream") is True
        if stream and body.get("seed") is None:
            # Drawn here, so that another replica can say the same.
            body["seed"] = secrets.randbits(62)
            data = json.dumps(body).encode()
        result = _Asked("POST", path, _headers(request), data, prompt, salt, key)
        if stream:
            return EventStream(self._stream(result, Progress(), resumable(body)))
        return await until_gone(request.receive, self._whole(result))

    async def _whole(self, asked: _Asked) -> Response:
        """An answer that is passed on when all of it is there."""
        tries = _Tries(self._replicas, self._deaths, asked.key)
        while True:
            replica = await self._pick(asked, tries)
            try:
                async with self._ask(replica, asked) as answered:
                    died = answered.headers.get(DIED)
                    if answered.status in _BUSY and tries.more(replica, answered.status, died):
                        continue
                    tries.served(answered.status)
                    kept = {n: answered.headers[n] for n in _PASSED_ON if n in answered.headers}
                    return Response(await answered.body(), answered.status, headers=kept)
            except ServerLostError as cause:
                if not tries.more(replica, died="" if cause.sent else None):
                    raise _broken(cause) from cause

    async def _stream(
        self, asked: _Asked, progress: Progress, resumes: bool
    ) -> AsyncGenerator[bytes, None]:
        """Events of a stream, from as many replicas as it takes.

        Raises:
            ApiError: before the first event; later errors are events themselves.
        """
        tries = _Tries(self._replicas, self._deaths, asked.key)
        try:
            while True:
                replica = await self._pick(asked, tries)
                try:
                    async with self._ask(replica, asked) as answered:
                        died = answered.headers.get(DIED)
                        if answered.status in _BUSY and tries.more(replica, answered.status, died):
                            continue
                        if answered.status != 200:
                            raise await _error_of(answered)
                        async for event in _events(answered, progress):
                            yield event
                        tries.served(answered.status)
                        break
                except ServerLostError as cause:
                    begun = progress.num_events > 0
                    more = tries.more(replica, died="" if cause.sent else None)
                    if (begun and not resumes) or not more:
                        raise _broken(cause) from cause
                    if begun:
                        progress.again()
                        self._metrics.resumed.inc()
        except (ApiError, DivergedError, RequestFailedError) as cause:
            if not progress.num_events:
                raise
            error = _broken(cause) if isinstance(cause, DivergedError) else as_api_error(cause)
            yield _event(json.dumps(error_body(error)).encode())
        if asked.target != _TYPED:
            yield _event(DONE)

    @contextlib.asynccontextmanager
    async def _ask(self, replica: Replica, asked: _Asked) -> AsyncGenerator[UpstreamResponse, None]:
        question = replica.ask(asked.method, asked.target, headers=asked.headers, body=asked.body)
        self._metrics.count_request(replica.number)
        with replica.load():
            async with question as answered:
                yield answered

    async def _pick(self, asked: _Asked, tries: _Tries) -> Replica:
        """The replica to ask next; waits for one that takes requests.

        Raises:
            ApiError: 503, none does for too long.
        """
        end = time.monotonic() + _PATIENCE_S
        while not (there := tries.open()):
            if self._replicas.ended:
                raise ApiError(self._replicas.ended, status=503, code="engine_unavailable")
            if time.monotonic() > end:
                raise _none_ready(len(self._replicas.all))
            await asyncio.sleep(_LOOK_S)
        loads = {replica.number: replica.num_open for replica in there}
        chosen = self._balancer.choose(asked.prompt, loads, salt=asked.salt)
        if tries.number:
            self._metrics.retried.inc()
        return self._replicas.all[chosen]


class _Tries:
    """Where a request has been.

    Args:
        replicas: where it can go.
        deaths: those that requests have met.
        key: of this request.

    Raises:
        RequestFailedError: it has met too many already.
    """

    def __init__(self, replicas: Replicas, deaths: CrashHistory, key: bytes) -> None:
        self._replicas = replicas
        self._deaths, self._key = deaths, key
        deaths.check(key)
        self._been: set[tuple[int, int]] = set()
        self.number = 0

    def open(self) -> list[Replica]:
        """Replicas that take requests and have not failed this one since they last started."""
        return [
            replica
            for replica in self._replicas.ready
            if (replica.number, replica.restarts) not in self._been
        ]

    def served(self, status: int) -> None:
        """It was answered with this status."""
        if status == 200 and self._deaths:
            self._deaths.served(self._key)

    def more(self, replica: Replica, status: int | None = None, died: str | None = None) -> bool:
        """Whether to try again, after a replica was lost or answered with this status.

        Args:
            replica: that was asked.
            status: of its answer.
            died: names the death of its engine, or is empty where the replica was lost, with this
                request; None for neither.

        Raises:
            RequestFailedError: the request has met too many deaths.
        """
        self.number += 1
        if died is not None and self._key:
            self._deaths.died([self._key], (replica.number, replica.restarts, died))
            self._deaths.check(self._key)
        if status == 503:
            replica.ready = False  # until it says that it is again
        else:
            self._been.add((replica.number, replica.restarts))
        if status == 429 and not self.open():
            return False  # all are full; the client is refused at once
        return self.number < _ATTEMPTS


def _headers(request: Request) -> dict[str, str]:
    given = request.headers.get("content-type")
    named = {"X-Request-Id": request.scope["state"]["request_id"]}
    trace = {n: request.headers[n] for n in _TRACE if n in request.headers}
    return {**named, **trace} | ({"Content-Type": given} if given else {})


def _none_ready(number: int) -> ApiError:
    return ApiError(
        f"none of {number} replicas takes requests; they are being started again",
        status=503,
        code="engine_unavailable",
        retry_after_s=1,
    )


def _broken(cause: ServeError) -> ApiError:
    why = "another replica gave another answer" if isinstance(cause, DivergedError) else str(cause)
    return ApiError(
        f"the replica that answered was lost, and the answer cannot go on elsewhere ({why}); "
        "ask again",
        status=503,
        code="replica_lost",
        retry_after_s=1,
    )


async def _error_of(answered: UpstreamResponse) -> ApiError:
    """The error that a replica answered with."""
    error = json.loads(await answered.body())["error"]
    message, param, code = (error[name] for name in ("message", "param", "code"))
    again = {n: answered.headers[n] for n in ("retry-after",) if n in answered.headers}
    return ApiError(message, status=answered.status, param=param, code=code, headers=again)


async def _events(answered: UpstreamResponse, progress: Progress) -> AsyncGenerator[bytes, None]:
    """What the client is to be sent of a replica's stream, its end excepted.

    Raises:
        ServerLostError: it breaks off, or its engine died.
        DivergedError: it says something else than what the client has.
    """
    held = bytearray()
    async for piece in answered.pieces:
        held += piece
        for data in split_events(held):
            if data == DONE:
                return
            if data.startswith((b'{"error"', b'{"type":"error"')) and _DIED in data:
                raise ServerLostError("its engine died")
            new = progress.take(data)
            if new is not None:
                yield _event(new)
            if is_last(data):
                return
    raise ServerLostError("its stream ended in the middle")


def _event(data: bytes) -> bytes:
    kind = type_of(data)
    return (b"event: " + kind + b"\n" if kind else b"") + b"data: " + data + b"\n\n"
