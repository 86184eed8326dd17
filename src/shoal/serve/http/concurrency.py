"""Concurrency limit: the answers of a request are admitted together or refused, before any waits.

A slot is held from the moment that the request is parsed until its answers end, so that no two
requests can both take the last one.
"""

from __future__ import annotations

from types import TracebackType

from shoal.serve.http.errors import ApiError


class ConcurrencySlot:
    """The slots of one request; released once, however often :meth:`leave` is called."""

    def __init__(self, limit: ConcurrencyLimit, number: int) -> None:
        self._limit = limit
        self._number = number

    def leave(self) -> None:
        """The answers have ended."""
        self._limit.used -= self._number
        self._number = 0

    def __enter__(self) -> None:
        """Taken already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class ConcurrencyLimit:
    """Limits the number of answers under way.

    Args:
        number: most answers under way or waiting.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.used = 0

    def take(self, number: int) -> ConcurrencySlot:
        """Room for the answers of a request.

        Raises:
            ApiError: 429, there is not enough.
        """
        if self.used + number > self._number:
            raise ApiError(
                f"{self.used} requests are open: expected at most {self._number} with "
                f"{number} more; try again",
                status=429,
                code="overloaded",
                retry_after_s=1,
            )
        self.used += number
        return ConcurrencySlot(self, number)
