"""A running server: the engine's process, the application, and the connections.

The engine's process is started first, so that it loads the model while this one gets ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ServeError, require
from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.ir.serve_job import ServeJob
from shoal.serve.engine.client import ClientOptions, EngineClient
from shoal.serve.engine.frames import DEFAULT_FACTORY
from shoal.serve.engine.launch import EngineProcess, launch
from shoal.serve.http.app_server import (
    AppOptions,
    Backend,
    access_of,
    check_host,
    in_thread,
    listening,
    until_stopped,
)
from shoal.serve.http.draining import DrainState
from shoal.train.layout import model_name

if TYPE_CHECKING:
    from fastapi import FastAPI

    from shoal.serve.cluster.replicas import Replicas


@dataclass(frozen=True, kw_only=True)
class ServerOptions(AppOptions):
    """Where and how a model is served.

    Args:
        name: what the model is called in requests; None for that of its run, or its directory.
        traces: where to send traces, as http://localhost:4318; nowhere if not given.
        client: how patient to be with the engine.
        factory: what builds the engine.
        adapter_routes: callers with the key may load adapters from directories of this machine,
            unload and merge them.
        adapter_root: the directory below which those are; None allows only the directories of the
            adapters that the job names.
    """

    name: str | None = None
    traces: str | None = None
    client: ClientOptions = field(default_factory=ClientOptions)
    factory: str = DEFAULT_FACTORY
    adapter_routes: bool = False
    adapter_root: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def work(ready: Callable[[RunningServer], None], halt: list[Callable[[], None]]) -> None:
        with _prepared(job, options) as (listener, launched):
            asyncio.run(_serve(job, options, listener, launched, ready, halt))

    with in_thread(work) as server:
        yield server


@contextlib.contextmanager
def _prepared(
    job: ServeJob, options: ServerOptions, begun: EngineProcess | None = None
) -> Iterator[tuple[socket.socket, EngineProcess | None]]:
    """What a user may have got wrong is known before anything is loaded."""
    check_host(options)
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
    with listening(options) as listener:
        launched = None if routed else launch(job, options.factory, begun)
        try:
            yield listener, launched
        finally:
            if launched is not None:
                launched.discard()


async def _serve(
    job: ServeJob,
    options: ServerOptions,
    listener: socket.socket,
    launched: EngineProcess | None,
    ready: Callable[[RunningServer], None],
    halt: list[Callable[[], None]] | None = None,
) -> int | None:
    """Serve until stopped; the number of the signal that did, if it was one."""
    drain = DrainState()
    backend: Backend
    if launched is None:
        from shoal.serve.cluster.replicas import Replicas

        backend = Replicas(job, options)
        starting = _start_replicas(job, options, backend, drain)
    else:
        backend = client = EngineClient(
            job, factory=options.factory, options=options.client, launched=launched
        )
        starting = _start_engine(job, options, client, drain)
    # The router asks a replica for each request, which takes another connection.
    return await until_stopped(
        starting,
        backend,
        options,
        listener,
        drain,
        lambda url: ready(RunningServer(url, _name(job, options), backend)),
        halt,
        descriptors=2 if launched is None else 1,
    )


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
        access = access_of(options)
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

    access = access_of(options)
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
