"""The back-end ``in_process``: containers are objects, and calls are threads."""

from __future__ import annotations

from shoal.core.parts import part
from shoal.fields.retrieve.serverless.functions import IndexFunctions
from shoal.fields.retrieve.serverless.protocols import (
    ContainerSetup,
    FunctionContainer,
    Invoker,
)


@part
class InProcess:
    """Functions in threads of this process: no isolation, and nothing to start."""

    def open(self) -> _Here:
        """Nothing to get ready."""
        return _Here()

    def call_s(self) -> float:
        """A thread and JSON."""
        return 4e-4

    def cores(self, available: int) -> int:
        """One interpreter makes all calls."""
        return 1

    def cold_s(self) -> float:
        """An object."""
        return 1e-4

    def memory_bytes(self) -> float:
        """None of its own."""
        return 0.0


class _Here:
    address = "127.0.0.1"

    def start(self, setup: ContainerSetup, invoker: Invoker) -> FunctionContainer:
        return IndexFunctions(setup, invoker)

    def close(self) -> None:
        """Nothing is left."""
