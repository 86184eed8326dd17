"""Outputs of a request between the engine that produces them and their reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.errors import ServeError
from shoal.ir.serving import Output, Request

Listener = Callable[[Mapping[str, Any]], object]
"""What is called with a message of the engine about a request."""


class OutputQueue:
    """Queue of the outputs of one request, between the engine and its reader.

    Args:
        request: as it was sent to the engine.
        on: kind of a message about the request -> its receiver.
    """

    __slots__ = ("_error", "_outputs", "_ready", "ended", "on", "request")

    def __init__(self, request: Request, on: Mapping[str, Listener]) -> None:
        self.request, self.on = request, on
        self._outputs: deque[Output] = deque()
        self._ready = asyncio.Event()
        self._error: ServeError | None = None
        self.ended = False

    def put(self, output: Output) -> int:
        """Keep an output; how many are unread now."""
        self._outputs.append(output)
        self.ended = self.ended or output.finish is not None
        self._ready.set()
        return len(self._outputs)

    def fail(self, error: ServeError) -> None:
        """End with an error, unless the last output is there already."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._outputs.clear()
            self._ready.set()

    async def take(self) -> list[Output]:
        """Everything unread, at least one output."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        taken = list(self._outputs)
        self._outputs.clear()
        return taken
