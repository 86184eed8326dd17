"""What a pool can do, whoever runs the processes.

Functions, arguments and results travel by pickle between processes of one user, so a
function must be importable by name on the other side: no lambdas, nothing defined inside
a function. An exception raised there comes back as itself, with the remote traceback as
a note; a process that dies is a :class:`~shoal.core.errors.RankError` that names it,
never a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

__all__ = ["Actor", "Pool", "PoolPart", "ordered_map"]

_T = TypeVar("_T")


@runtime_checkable
class Actor(Protocol):
    """One object that lives in a process of its own; its calls run one by one, in order."""

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the object."""
        ...

    def close(self) -> None:
        """End the process; calls that have not finished fail."""
        ...


@runtime_checkable
class Pool(Protocol):
    """Running workers. A context manager; leaving it by an exception ends them at once."""

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call ``function`` on some worker.

        Raises:
            ConfigError: the function or an argument cannot be sent.
        """
        ...

    def map(self, function: Callable[..., _T], /, *iterables: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments; the first error ends the iteration."""
        ...

    def actor(self, cls: type[Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Construct an object in a process of its own, beside the workers.

        Raises:
            Exception: what the constructor raised.
        """
        ...

    def close(self, *, now: bool = False) -> None:
        """Finish what was submitted, or give it up ``now``, and end all processes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class PoolPart(Protocol):
    """A part of kind ``pool``: says where the workers are, and starts them."""

    def open(self) -> Pool:
        """Start the workers.

        Raises:
            MissingExtraError: an optional package is not installed.
        """
        ...


def ordered_map(
    pool: Pool, function: Callable[..., _T], iterables: tuple[Iterable[Any], ...]
) -> Iterator[_T]:
    """Submit every call, then yield the results in order; give up the rest on an error."""
    futures = [pool.submit(function, *args) for args in zip(*iterables, strict=False)]

    def results() -> Iterator[_T]:
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    return results()
