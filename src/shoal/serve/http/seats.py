"""Answers that may be under way at once: taken all together or not at all, before anything waits.

An answer has its seat from the moment that its request was understood until it has ended, so
that no two requests can both see the last one free.
"""

from __future__ import annotations

from types import TracebackType

from shoal.serve.http.errors import ApiError

__all__ = ["Seat", "Seats"]


class Seat:
    """Room for the answers of one request; left once, however often it is said."""

    def __init__(self, seats: Seats, number: int) -> None:
        self._seats = seats
        self._number = number

    def leave(self) -> None:
        """The answers have ended."""
        self._seats.taken -= self._number
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


class Seats:
    """Room for so many answers.

    Args:
        number: of answers under way or waiting.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.taken = 0

    def take(self, number: int) -> Seat:
        """Room for the answers of a request.

        Raises:
            ApiError: 429, there is not enough.
        """
        if self.taken + number > self._number:
            raise ApiError(
                f"{self.taken} answers are under way: expected at most {self._number} with "
                f"{number} more; try again",
                status=429,
                code="overloaded",
                retry_after_s=1,
            )
        self.taken += number
        return Seat(self, number)
