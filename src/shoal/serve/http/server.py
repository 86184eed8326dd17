"""A running server: the engine's process, the application, and the connections.

The engine's process is started first, so that it loads the model while this one gets ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core.errors import ServeError, require
from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.ir.serve_job import ServeJob
from shoal.serve.engine.client import ClientOptions, EngineClient
from shoal.serve.engine.frames import DEFAULT_FACTORY
from shoal.serve.engine.launch import EngineProcess, launch
from shoal.serve.http.draining import DrainState
from shoal.serve.http.limits import HttpLimits
from shoal.train.layout import model_name

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from shoal.serve.cluster.replicas import Replicas
    from shoal.serve.http.guard import AccessControl

log = logging.getLogger("shoal.serve")

# s that cut streams get to inform their readers, which may not read.
_FAREWELL_S = 2
# s between two looks at whether all have left.
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen.

    Args:
        host: address to listen on; anything but this machine itself needs a key.
        port: 0 for any free one.
        name: what the model is called in requests; None for that of its run, or its directory.
        key: what callers must send; None lets all users of this machine in.
        hosts: further names that ``Host`` may have.
        origins: web pages that may call.
        limits: limits of the options of a request.
        grace_s: s that open answers get to end when the server is stopped; others get 503.
        traces: where to send traces, as http://localhost:4318; nowhere if not given.
        client: how patient to be with the engine.
        factory: what builds the engine.
        adapter_routes: callers with the key may load adapters from directories of this machine,
            unload and merge them.
        adapter_root: the directory below which those are; None allows only the directories of the
            adapters that the job names.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    grace_s: float = 5.0
    traces: str | None = None
    client: ClientOptions = field(default_factory=ClientOptions)
    factory: str = DEFAULT_FACTORY
    adapter_routes: bool = False
    adapter_root: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, expected="0 to 65535", error=ServeError)
        require(
            not self.adapter_routes or self.key is not None,
            "adapter_routes",
            self.adapter_routes,
            expected="a key that callers must send: they change what everybody is served",
            hint="give one, made with: openssl rand -hex 16",
            error=ServeError,
        )
        require(
            self.adapter_root is None or (self.adapter_routes and Path(self.adapter_root).is_dir()),
            "adapter_root",
            self.adapter_root,
            expected="a directory, and adapter_routes",
            error=ServeError,
        )


class Backend(Protocol):
    """What computes behind a server: an engine, or replicas with one each."""

    def end_all(self, reason: str) -> None:
        """End every open answer with an error."""

    async def stop(self) -> None:
        """End its processes."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Args:
        url: its address, without ``/v1``.
        model: what the model is called in requests.
        backend: the client of its engine, or its replicas.
    """

    url: str
    model: str
    backend: Backend

    @property
    def engine(self) -> EngineClient:
        """The client of its engine, where it has one."""
        assert isinstance(self.backend, EngineClient)
        return self.backend


def serve_at(job: ServeJob, options: ServerOptions, listener: socket.socket) -> None:
    """Serve on a socket that is bound already, until SIGTERM.

    Args:
        job: what to serve, in one replica.
        options: how to serve.
        listener: where; its safety is not checked.

    Raises:
        ShoalError: the model cannot be served.
    """
    launched = launch(job, options.factory)
    try:
        asyncio.run(_serve(job, options, listener, launched, lambda _: None))
    finally:
        launched.discard()


def serve(
    job: ServeJob,
    options: ServerOptions,
    *,
    ready: Callable[[RunningServer], None] | None = None,
    begun: EngineProcess | None = None,
) -> int | None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP, and then until open answers have ended.

    Args:
        job: what to serve.
        options: where and how to listen.
        ready: called when the server answers.
        begun: a process for its engine, from :func:`shoal.serve.engine.launch.begin`.

    Returns:
        The number of the signal.

    Raises:
        ShoalError: the address is taken or not allowed, or the model cannot be served.
    """
    with _prepared(job, options, begun) as (listener, launched):
        return asyncio.run(_serve(job, options, listener, launched, ready or (lambda _: None)))


@contextlib.contextmanager
def running(job: ServeJob, options: ServerOptions | None = None) -> Iterator[RunningServer]:
    """A server in a thread of this process, for as long as the block takes.

    Raises:
        ShoalError: it does not start.
    """
    options = options or ServerOptions(port=0)
    started: list[RunningServer] = []
    failed: list[BaseException] = []
    known = threading.Event()
    halt: list[Callable[[], None]] = []

    def ready(server: RunningServer) -> None:
        started.append(server)
        known.set()

    def work() -> None:
        try:
            with _prepared(job, options) as (listener, launched):
                asyncio.run(_serve(job, options, listener, launched, ready, halt))
        except BaseException as cause:  # handed to the thread that waits
            failed.append(cause)
        finally:
            known.set()

    thread = threading.Thread(target=work, name="shoal-serve", daemon=True)
    thread.start()
    try:
        known.wait()
        if not started:
            thread.join()
            raise failed[0]
        yield started[0]
    finally:
        for stop in halt:
            stop()
        thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _prepared(
    job: ServeJob, options: ServerOptions, begun: EngineProcess | None = None
) -> Iterator[tuple[socket.socket, EngineProcess | None]]:
    """What a user may have got wrong is known before anything is loaded."""
    from shoal.serve.http.guard import is_loopback

    require(
        options.key is not None or is_loopback(options.host),
        "host",
        options.host,
        expected="127.0.0.1, or an API key",
        hint="with --host other machines can call; set SHOAL_API_KEY or give --api-key-file",
        error=ServeError,
    )
    routed = job.replicas > 1 or "remote" in traits("pool", job.launcher)
    require(
        not (routed and options.adapter_routes),
        "adapter_routes",
        options.adapter_routes,
        expected="false with replicas: each would load adapters of its own",
        hint="name the adapters at the start, with --adapter",
        error=ServeError,
    )
    directory = Path(job.model)
    if not directory.is_dir():
        raise ServeError(
            f"model = {job.model!r}: no such directory: expected a Hugging Face model directory, "
            "such as the export of a run"
        )
    listener = _listen(options.host, options.port)
    try:
        launched = None if routed else launch(job, options.factory, begun)
        try:
            yield listener, launched
        finally:
            if launched is not None:
                launched.discard()
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio would leave Nagle's algorithm on: 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as cause:
        listener.close()
        raise _not_listening(host, port, cause) from cause
    return listener


def _not_listening(host: str, port: int, cause: OSError) -> ServeError:
    if cause.errno == errno.EADDRINUSE:
        return ServeError(
            f"port = {port}: in use by another process; choose another with --port, or 0 for "
            "any free one"
        )
    return ServeError(
        f"host = {host!r}, port = {port}: cannot listen there ({cause.strerror or cause}); "
        "choose another address"
    )


async def _serve(
    job: ServeJob,
    options: ServerOptions,
    listener: socket.socket,
    launched: EngineProcess | None,
    ready: Callable[[RunningServer], None],
    halt: list[Callable[[], None]] | None = None,
) -> int | None:
    """Serve until stopped; the number of the signal that did, if it was one."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    caught: list[int] = []
    signals = _on_signals(loop, stop, caught)
    if halt is not None:
        halt.append(functools.partial(_call_soon, loop, stop.set))
    door = DrainState()
    backend: Backend
    if launched is None:
        from shoal.serve.cluster.replicas import Replicas

        backend = Replicas(job, options)
        starting = asyncio.create_task(_start_replicas(job, options, backend, door))
    else:
        backend = client = EngineClient(
            job, factory=options.factory, options=options.client, launched=launched
        )
        starting = asyncio.create_task(_start_engine(job, options, client, door))
    stopping = asyncio.create_task(stop.wait())
    app = None
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return next(iter(caught), None)
        app = starting.result()
        address = RunningServer(_address(options, listener), _name(job, options), backend)
        # The router asks a replica for each request, which takes another connection.
        descriptors = 2 if launched is None else 1
        server = _uvicorn(app, options, descriptors)
        run = _Run(server, listener, door, options.grace_s)
        await run.until(stop, stopping, lambda: ready(address), backend)
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await backend.stop()
        if app is not None:
            await app.state.stop()
        for number, handler in signals.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return next(iter(caught), None)


def _address(options: ServerOptions, listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _name(job: ServeJob, options: ServerOptions) -> str:
    return options.name or model_name(Path(job.model))


async def _start_engine(
    job: ServeJob, options: ServerOptions, client: EngineClient, drain: DrainState
) -> FastAPI:
    """Everything that takes time, while the engine loads."""
    loading = asyncio.create_task(client.start())
    try:
        from shoal.corpora.chat.template import load_template
        from shoal.serve.adapters.routes import AdapterPlaces
        from shoal.serve.http.api import create_app
        from shoal.serve.http.traces import exporting
        from shoal.serve.text.pieces import TextModel

        directory = Path(job.model)
        text = await asyncio.to_thread(TextModel, directory)
        template = load_template(directory)
        access = _access(options)
        provider = None if options.traces is None else exporting(options.traces)
        model = await loading
        text.check(model.vocab_size)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    places = None
    if options.adapter_routes:
        places = AdapterPlaces(options.adapter_root, job.adapters.values())
    return create_app(
        client,
        text,
        template,
        name=_name(job, options),
        access=access,
        limits=options.limits,
        drain=drain,
        provider=provider,
        adapter_places=places,
    )


async def _start_replicas(
    job: ServeJob, options: ServerOptions, replicas: Replicas, drain: DrainState
) -> FastAPI:
    from shoal.serve.cluster.router import create_router

    access = _access(options)
    balancer = table("balancer").build(job.balancer, where="balancer").build()
    await replicas.start()
    return create_router(
        replicas,
        balancer,
        name=_name(job, options),
        access=access,
        limits=options.limits,
        drain=drain,
    )


def _uvicorn(app: FastAPI, options: ServerOptions, descriptors: int) -> uvicorn.Server:
    import uvicorn

    from shoal.serve.http.accept import BoundedServer

    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=options.limits.header_bytes,
        timeout_graceful_shutdown=_FAREWELL_S,
    )
    return BoundedServer(config, limits=options.limits, descriptors=descriptors)


def _access(options: ServerOptions) -> AccessControl:
    from shoal.serve.http.guard import AccessControl, is_loopback

    # Clients from elsewhere need a key; the names they use cannot be known here.
    local = is_loopback(options.host)
    hosts = (options.host, *options.hosts) if local or options.hosts else ("*",)
    return AccessControl(key=options.key, hosts=hosts, origins=options.origins)


@dataclass
class _Run:
    """A server that listens, until it has drained.

    Args:
        server: of uvicorn.
        listener: where it listens.
        drain: closed when it is to end.
        grace_s: s that requests inside get to end.
    """

    server: uvicorn.Server
    listener: socket.socket
    drain: DrainState
    grace_s: float

    async def until(
        self,
        stop: asyncio.Event,
        stopping: asyncio.Task[Any],
        ready: Callable[[], None],
        backend: Backend,
    ) -> None:
        """Answer until stopped, and then until open requests have ended; not if stopped again."""
        try:
            self.listener.listen()
        except OSError as cause:  # another server began to listen while this one loaded
            host, port = self.listener.getsockname()[:2]
            raise _not_listening(host, port, cause) from None
        # Its own handling of signals would end the program in the middle of our cleaning up.
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        try:
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.005)
            ready()
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._drain(stop)
        finally:
            self.server.should_exit = True
            backend.end_all("the server is stopping")
            await serving

    async def _drain(self, stop: asyncio.Event) -> None:
        """Refuse new requests, and wait for the open ones."""
        self.drain.closed = True
        stop.clear()
        end = time.monotonic() + self.grace_s
        while self.drain.inside and not stop.is_set() and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From another thread; a loop that has ended is ignored."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _on_signals(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, caught: list[int]
) -> dict[signal.Signals, Any]:
    """Let signals set ``stop``; returns what handled them before."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def handle(number: signal.Signals) -> None:
        caught.append(number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {n: before[n] for n in numbers if before[n] is not signal.SIG_IGN}
    for number in handled:
        loop.add_signal_handler(number, handle, number)
    return handled
