"""A running application: its address, its connections, its end.

What a server of models and a server of anything else share; the first is in ``server.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from shoal.core.errors import ServeError, require
from shoal.serve.http.draining import DrainState
from shoal.serve.http.limits import HttpLimits

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from shoal.serve.http.guard import AccessControl

# s that cut streams get to inform their readers, which may not read.
_FAREWELL_S = 2
# s between two looks at whether all have left.
_LOOK_S = 0.02

_Started = TypeVar("_Started")

AppMaker: TypeAlias = "Callable[[AccessControl, DrainState], FastAPI]"
"""(who may call, whether the server drains) -> an application."""


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Where and how an application listens.

    Args:
        host: address to listen on; anything but this machine itself needs a key.
        port: 0 for any free one.
        key: what callers must send; None lets all users of this machine in.
        keys: further keys.
        key_header: a header that may have the key in the place of ``Authorization``.
        hosts: further names that ``Host`` may have.
        origins: web pages that may call.
        limits: limits of the options of a request.
        grace_s: s that open answers get to end when the server is stopped; others get 503.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = field(default=None, repr=False)
    keys: tuple[str, ...] = field(default=(), repr=False)
    key_header: str = ""
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, expected="0 to 65535", error=ServeError)


class Backend(Protocol):
    """What computes behind a server: an engine, or replicas with one each."""

    def end_all(self, reason: str) -> None:
        """End every open answer with an error."""

    async def stop(self) -> None:
        """End its processes."""


def serve_app(
    make: AppMaker, options: AppOptions, *, ready: Callable[[str], None] | None = None
) -> int | None:
    """Serve an application that has no engine, as ``server.serve`` does a model.

    Args:
        make: builds it in another thread; its ``state.stop`` ends what was started for it.
        options: where and how to listen.
        ready: called with the address when the server answers.

    Returns:
        The number of the signal.

    Raises:
        ShoalError: the address is taken or not allowed, or ``make`` fails.
    """
    with listening(options) as listener:
        return asyncio.run(_serve_app(make, options, listener, ready or (lambda _: None)))


@contextlib.contextmanager
def running_app(make: AppMaker, options: AppOptions) -> Iterator[str]:
    """An application in a thread of this process, for as long as the block takes; its address.

    Raises:
        ShoalError: it does not start.
    """

    def work(ready: Callable[[str], None], halt: list[Callable[[], None]]) -> None:
        with listening(options) as listener:
            asyncio.run(_serve_app(make, options, listener, ready, halt))

    with in_thread(work) as url:
        yield url


@contextlib.contextmanager
def in_thread(
    work: Callable[[Callable[[_Started], None], list[Callable[[], None]]], None],
) -> Iterator[_Started]:
    """Work that calls ``ready`` once, in a thread that ends with the block."""
    started: list[_Started] = []
    failed: list[BaseException] = []
    known = threading.Event()
    halt: list[Callable[[], None]] = []

    def ready(server: _Started) -> None:
        started.append(server)
        known.set()

    def whole() -> None:
        try:
            work(ready, halt)
        except BaseException as cause:  # handed to the thread that waits
            failed.append(cause)
        finally:
            known.set()

    thread = threading.Thread(target=whole, name="shoal-serve", daemon=True)
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


def check_host(options: AppOptions) -> None:
    """Refuse an address that others can reach when there is no key.

    Raises:
        ServeError: it is such an address.
    """
    from shoal.serve.http.guard import is_loopback

    require(
        options.key is not None or bool(options.keys) or is_loopback(options.host),
        "host",
        options.host,
        expected="127.0.0.1, or an API key",
        hint="with --host other machines can call; set SHOAL_API_KEY or give --api-key-file",
        error=ServeError,
    )


@contextlib.contextmanager
def listening(options: AppOptions) -> Iterator[socket.socket]:
    """A socket that is bound, if the address is allowed."""
    check_host(options)
    listener = _listen(options.host, options.port)
    try:
        yield listener
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


class _NoEngine:
    """The backend of an application that computes in this process."""

    def end_all(self, reason: str) -> None:
        """Nothing is open outside of the application."""

    async def stop(self) -> None:
        """Nothing was started."""


async def _serve_app(
    make: AppMaker,
    options: AppOptions,
    listener: socket.socket,
    ready: Callable[[str], None],
    halt: list[Callable[[], None]] | None = None,
) -> int | None:
    drain = DrainState()
    starting = asyncio.to_thread(make, access_of(options), drain)
    return await until_stopped(starting, _NoEngine(), options, listener, drain, ready, halt)


async def until_stopped(
    starting: Coroutine[Any, Any, FastAPI],
    backend: Backend,
    options: AppOptions,
    listener: socket.socket,
    drain: DrainState,
    ready: Callable[[str], None],
    halt: list[Callable[[], None]] | None = None,
    *,
    descriptors: int = 1,
) -> int | None:
    """Serve an application once it has started; the number of the signal that stopped it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    caught: list[int] = []
    signals = _on_signals(loop, stop, caught)
    if halt is not None:
        halt.append(functools.partial(_call_soon, loop, stop.set))
    start = asyncio.create_task(starting)
    stopping = asyncio.create_task(stop.wait())
    app = None
    try:
        await asyncio.wait([start, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            return next(iter(caught), None)
        app = start.result()
        url = _address(options, listener)
        server = _uvicorn(app, options, descriptors)
        run = _Run(server, listener, drain, options.grace_s)
        await run.until(stop, stopping, lambda: ready(url), backend)
    finally:
        start.cancel()
        stopping.cancel()
        await asyncio.gather(start, stopping, return_exceptions=True)
        await backend.stop()
        if app is not None:
            await app.state.stop()
        for number, handler in signals.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return next(iter(caught), None)


def _address(options: AppOptions, listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _uvicorn(app: FastAPI, options: AppOptions, descriptors: int) -> uvicorn.Server:
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


def access_of(options: AppOptions) -> AccessControl:
    """Who may call a server with these options."""
    from shoal.serve.http.guard import AccessControl, is_loopback

    # Clients from elsewhere need a key; the names they use cannot be known here.
    local = is_loopback(options.host)
    hosts = (options.host, *options.hosts) if local or options.hosts else ("*",)
    return AccessControl(
        key=options.key,
        hosts=hosts,
        origins=options.origins,
        keys=options.keys,
        key_header=options.key_header,
    )


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
