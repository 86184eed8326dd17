"""A running server: the engine's process, the application, and the connections.

The engine's process is started first, so that it loads the model while this one gets ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ServeError, require
from shoal.ir.job import ServeJob
from shoal.serve.client import ClientOptions, EngineClient, Launched, launch
from shoal.serve.limits import HttpLimits
from shoal.serve.process import DEFAULT_FACTORY

if TYPE_CHECKING:
    import uvicorn

    from shoal.serve.guard import Access

__all__ = ["Running", "ServerOptions", "running", "serve"]

log = logging.getLogger("shoal.serve")

# s that cut streams get to tell their readers, who may not read.
_FAREWELL_S = 2
_FILES = 16_384
_BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where and how to listen.

    Args:
        host: address to listen on; anything but this machine itself needs a key.
        port: 0 for any free one.
        name: what the model is called in requests; None for its directory's name.
        key: what callers must send; None lets everybody on this machine in.
        hosts: further names that ``Host`` may have.
        origins: web pages that may call.
        limits: what a request may ask for.
        grace_s: s that open answers get to end when the server is stopped.
        client: how patient to be with the engine.
        factory: what builds the engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    grace_s: float = 5.0
    client: ClientOptions = field(default_factory=ClientOptions)
    factory: str = DEFAULT_FACTORY

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, expected="0 to 65535", error=ServeError)


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Args:
        url: its address, without ``/v1``.
        model: what the model is called in requests.
        engine: the client of its engine.
    """

    url: str
    model: str
    engine: EngineClient


def serve(
    job: ServeJob, options: ServerOptions, *, ready: Callable[[Running], None] | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        job: what to serve.
        options: where and how to listen.
        ready: called when the server answers.

    Raises:
        ShoalError: the address is taken or not allowed, or the model cannot be served.
    """
    with _prepared(job, options) as (listener, launched):
        asyncio.run(_serve(job, options, listener, launched, ready or (lambda _: None)))


@contextlib.contextmanager
def running(job: ServeJob, options: ServerOptions | None = None) -> Iterator[Running]:
    """A server in a thread of this process, for as long as the block takes.

    Raises:
        ShoalError: it does not start.
    """
    options = options or ServerOptions(port=0)
    started: list[Running] = []
    failed: list[BaseException] = []
    known = threading.Event()
    halt: list[Callable[[], None]] = []

    def ready(server: Running) -> None:
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
def _prepared(job: ServeJob, options: ServerOptions) -> Iterator[tuple[socket.socket, Launched]]:
    """What a user may have got wrong is known before anything is loaded."""
    from shoal.serve.guard import is_loopback

    require(
        options.key is not None or is_loopback(options.host),
        "host",
        options.host,
        expected="127.0.0.1, or an API key",
        hint="with --host other machines can call; set SHOAL_API_KEY or give --api-key-file",
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
        launched = launch(job, options.factory)
        try:
            yield listener, launched
        finally:
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


def _allow_files() -> None:
    """A thousand idle connections need more descriptors than most shells allow by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    job: ServeJob,
    options: ServerOptions,
    listener: socket.socket,
    launched: Launched,
    ready: Callable[[Running], None],
    halt: list[Callable[[], None]] | None = None,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = _on_signals(loop, stop)
    if halt is not None:
        halt.append(functools.partial(_call_soon, loop, stop.set))
    client = EngineClient(job, factory=options.factory, options=options.client, launched=launched)
    starting = asyncio.create_task(_start(job, options, client))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        server, name, _ = starting.result()
        address = _address(options, listener, name, client)
        await _run(server, listener, stopping, lambda: ready(address), client, options.grace_s)
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await client.stop()
        if not starting.cancelled() and starting.exception() is None:
            await starting.result()[2]()
        for number in signals:
            loop.remove_signal_handler(number)


def _address(
    options: ServerOptions, listener: socket.socket, name: str, client: EngineClient
) -> Running:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return Running(f"http://{host}:{listener.getsockname()[1]}", name, client)


async def _start(
    job: ServeJob, options: ServerOptions, client: EngineClient
) -> tuple[uvicorn.Server, str, Callable[[], Awaitable[None]]]:
    """Everything that takes time, while the engine loads; also what ends it."""
    loading = asyncio.create_task(client.start())
    try:
        import uvicorn

        from shoal.serve.api import create_app
        from shoal.serve.connection import connection
        from shoal.serve.guard import is_loopback
        from shoal.serve.template import load_template
        from shoal.serve.text import TextModel

        directory = Path(job.model)
        name = options.name or directory.resolve().name
        text = await asyncio.to_thread(TextModel, directory)
        template = load_template(directory)
        access = _access(options, local=is_loopback(options.host))
        model = await loading
        text.check(model.vocab_size)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    app = create_app(client, text, template, name=name, access=access, limits=options.limits)
    config = uvicorn.Config(
        app,
        http=connection(options.limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=options.limits.header_bytes,
        timeout_graceful_shutdown=math.ceil(options.grace_s) + _FAREWELL_S,
        backlog=_BACKLOG,
    )
    return uvicorn.Server(config), name, app.state.stop


def _access(options: ServerOptions, *, local: bool) -> Access:
    from shoal.serve.guard import Access

    # Whoever may call from elsewhere has a key; the names it uses cannot be known here.
    hosts = (options.host, *options.hosts) if local or options.hosts else ("*",)
    return Access(key=options.key, hosts=hosts, origins=options.origins)


async def _run(
    server: uvicorn.Server,
    listener: socket.socket,
    stopping: asyncio.Task[Any],
    ready: Callable[[], None],
    client: EngineClient,
    grace_s: float,
) -> None:
    _allow_files()
    try:
        listener.listen(_BACKLOG)
    except OSError as cause:  # another server began to listen while this one loaded
        host, port = listener.getsockname()[:2]
        raise _not_listening(host, port, cause) from None
    # Its own handling of signals would end the program in the middle of our cleaning up.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        ready()
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        await asyncio.wait([serving], timeout=grace_s)
        client.end_all("the server is stopping")
        await serving


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From another thread; a loop that has ended needs no telling."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    return numbers
