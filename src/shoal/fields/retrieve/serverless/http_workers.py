"""The back-end ``http``: each container is a process with an HTTP server of its own."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.core.pool import Actor
from shoal.core.pool.local import LocalPool
from shoal.fields.retrieve.serverless.http import FunctionServer, post
from shoal.fields.retrieve.serverless.processes import PooledContainer, PooledHost, RemoteFunctions
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    ContainerSetup,
    FunctionContainer,
    Invoker,
)


@part
class HttpWorkers:
    """Functions behind HTTP servers, one for each container, on this machine."""

    call_s: ClassVar = 3e-3  # two requests of HTTP
    cold_s: ClassVar = 0.65  # an interpreter with numpy, and its server
    memory_bytes: ClassVar = 6e7

    def open(self) -> _Host:
        return _Host(LocalPool(workers=1).open(), "127.0.0.1")

    def cores(self, available: int) -> int:
        return available


class HttpFunctions:
    """The server of a container, in its process.

    Args:
        setup: of the container, as a tuple.
    """

    def __init__(self, setup: tuple[str, str, str, float]) -> None:
        functions, token = RemoteFunctions(setup), ContainerSetup(*setup).token
        self._server = FunctionServer(functions.call, token, "127.0.0.1")

    def address(self) -> str:
        """Where it listens."""
        return self._server.address


class _Host(PooledHost):
    def start(self, setup: ContainerSetup, invoker: Invoker) -> FunctionContainer:
        actor = self._pool.actor(HttpFunctions, tuple(setup))
        return _Worker(actor, actor.call("address").result(LIMIT_S), setup.token)


class _Worker(PooledContainer):
    def __init__(self, actor: Actor, address: str, token: str) -> None:
        super().__init__(actor)
        self._address, self._token = address, token

    def call(self, name: str, payload: str) -> str:
        return post(self._address, self._token, name, payload)
