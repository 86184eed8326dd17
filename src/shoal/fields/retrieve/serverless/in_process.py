"""The back-end ``in_process``: containers are objects, and calls are threads."""

from __future__ import annotations

from typing import ClassVar

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

    call_s: ClassVar = 4e-4  # a thread and JSON
    cold_s: ClassVar = 1e-4  # an object
    memory_bytes: ClassVar = 0.0

    def open(self) -> _Here:
        """Nothing to get ready."""
        return _Here()

    def cores(self, available: int) -> int:
        """One interpreter makes all calls."""
        return 1


class _Here:
    address = "127.0.0.1"

    def start(self, setup: ContainerSetup, invoker: Invoker) -> FunctionContainer:
        return IndexFunctions(setup, invoker)

    def close(self) -> None:
        """Nothing is left."""
