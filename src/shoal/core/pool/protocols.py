"""What every kind of pool can do.

Functions, arguments and results travel by pickle between processes of one user, so a
function must have a name at the top of a module that the other side can import, or of
the script that runs: no lambdas, nothing defined inside a function. An exception raised
there comes back as itself, with the remote traceback as a note; a process that dies is a
:class:`~shoal.core.errors.RankError` that names it, never a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from shoal.core.errors import RankError

START_S = 600.0
"""s that a process may take to import what it needs and to make the object of an actor."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ActorResources:
    """What each actor of a pool takes from the machine on which it is placed.

    Args:
        cpus: processors that are kept for it.
        gpus: GPUs that are kept for it; it sees these and no others.
    """

    cpus: float = 0.0
    gpus: float = 0.0


@runtime_checkable
class Actor(Protocol):
    """One object that lives in a process of its own; its calls run one by one, in order."""

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the object."""

    def close(self) -> None:
        """End the process; calls that have not finished fail."""


@runtime_checkable
class Pool(Protocol):
    """Running workers. A context manager; leaving it by an exception ends them at once."""

    @property
    def num_nodes(self) -> int:
        """Machines over which its actors are spread."""

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call ``function`` on some worker.

        Raises:
            ConfigError: the function or an argument cannot be sent.
        """

    def map(self, function: Callable[..., _T], /, *iterables: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments; the first error ends the iteration."""

    def actor(self, cls: type[Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Construct an object in a process of its own, beside the workers.

        Raises:
            Exception: what the constructor raised.
        """

    def close(self, *, now: bool = False) -> None:
        """Finish what was submitted, or give it up ``now``, and end all processes."""

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

    def open(self, needs: ActorResources = ActorResources()) -> Pool:
        """Start the workers.

        Args:
            needs: of each actor; a pool of one machine does not keep books of it.

        Raises:
            MissingExtraError: an optional package is not installed.
        """


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


def await_object(made: Future[Any], name: str, limit_s: float = START_S) -> None:
    """Wait until the object of an actor is made.

    Args:
        made: the call of its constructor.
        name: of the actor.
        limit_s: how long that may take.

    Raises:
        RankError: it took longer.
        Exception: what the constructor raised.
    """
    try:
        made.result(limit_s)
    except TimeoutError:
        if made.done():  # the constructor's own
            raise
        raise RankError(f"pool {name}: not ready within {limit_s:g} s") from None
