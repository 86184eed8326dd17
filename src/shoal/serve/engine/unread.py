"""Outputs of a request between the engine that gives them and whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from shoal.core.errors import ServeError
from shoal.ir.serving import Output, SamplingParams

__all__ = ["Unread"]


class Unread:
    """The outputs of one request that its reader has not taken yet.

    Args:
        began: called with when the first step of the request began, s on the monotonic clock.
        asked: what the request is: tokens of its prompt, how to sample, and its adapter.
    """

    __slots__ = ("_error", "_ready", "_unread", "asked", "began", "ended", "vector")

    def __init__(
        self,
        began: Callable[[float], None] | None,
        asked: tuple[Sequence[int], SamplingParams, str | None],
    ) -> None:
        self.began, self.asked = began, asked
        self._unread: deque[Output] = deque()
        self._ready = asyncio.Event()
        self._error: ServeError | None = None
        self.ended = False
        self.vector: list[float] | None = None

    def put(self, output: Output) -> int:
        """Keep an output; how many are unread now."""
        self._unread.append(output)
        self.ended = self.ended or output.finish is not None
        self._ready.set()
        return len(self._unread)

    def fail(self, error: ServeError) -> None:
        """End with an error, unless the last output is there already."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._unread.clear()
            self._ready.set()

    async def take(self) -> list[Output]:
        """Everything unread, at least one output."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        taken = list(self._unread)
        self._unread.clear()
        return taken
