"""The back-end ``processes``: a process for each container, which pipes reach."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import RankError
from shoal.core.parts import part
from shoal.core.pool import Actor, Pool
from shoal.core.pool.local import LocalPool
from shoal.fields.retrieve.serverless.functions import IndexFunctions
from shoal.fields.retrieve.serverless.invoking import RemoteInvoker
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    ContainerSetup,
    FunctionContainer,
    FunctionError,
    Invoker,
)


@part
class FunctionProcesses:
    """Functions in processes of this machine."""

    call_s: ClassVar = 2e-3  # a pipe, a thread, and HTTP for calls of functions by functions
    cold_s: ClassVar = 0.6  # an interpreter with numpy
    memory_bytes: ClassVar = 6e7

    def open(self) -> PooledHost:
        return PooledHost(LocalPool(workers=1).open(), "127.0.0.1")

    def cores(self, available: int) -> int:
        return available


class RemoteFunctions(IndexFunctions):
    """The functions of a container in a process of its own.

    Args:
        setup: of the container, as a tuple.
    """

    def __init__(self, setup: tuple[str, str, str, float]) -> None:
        given = ContainerSetup(*setup)
        super().__init__(given, RemoteInvoker(given))


class PooledHost:
    """Containers that are actors of a pool.

    Args:
        pool: it is closed with this.
        address: of this machine.
    """

    def __init__(self, pool: Pool, address: str) -> None:
        self._pool, self.address = pool, address

    def start(self, setup: ContainerSetup, invoker: Invoker) -> FunctionContainer:
        return PooledContainer(self._pool.actor(RemoteFunctions, tuple(setup)))

    def close(self) -> None:
        """End the pool."""
        self._pool.close(now=True)


class PooledContainer:
    """A container that is an actor."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def call(self, name: str, payload: str) -> str:
        """Call its functions.

        Raises:
            FunctionError: the function failed, or the actor has ended.
        """
        try:
            answer: str = self._actor.call("call", name, payload).result(LIMIT_S)
        except RankError as cause:
            raise FunctionError(f"{name}: its container has ended: {cause}") from cause
        except TimeoutError as cause:
            raise FunctionError(f"{name}: no answer after {LIMIT_S:g} s") from cause
        return answer

    def close(self) -> None:
        self._actor.close()
