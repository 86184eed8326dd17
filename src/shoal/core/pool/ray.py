"""The same pool on Ray: one machine or a cluster.

Calls and outcomes are packed as for local processes, so results, exceptions and their
notes are the same; Ray only decides where they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from shoal.core.errors import RankError, require
from shoal.core.extras import import_extra
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.core.pool.protocols import ordered_map
from shoal.core.pool.remote import (
    construct,
    name_of,
    pack_call,
    run_call,
    run_method,
    unpack_outcome,
)

__all__ = ["RayPool"]

_T = TypeVar("_T")


@part
class RayPool:
    """Workers of a Ray cluster.

    Args:
        address: of a running cluster (``auto`` finds it); empty starts one on this
            machine, which ends with the pool.
        workers: processors of the cluster that is started here; 0 for all cores.
        cpus_per_call: processors that Ray keeps for one call.
    """

    address: str = ""
    workers: int = 0
    cpus_per_call: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        require(self.workers >= 0, "pool.ray.workers", self.workers, expected="0 or more")
        require(
            self.cpus_per_call >= 0,
            "pool.ray.cpus_per_call",
            self.cpus_per_call,
            expected="0 or more",
        )

    def open(self) -> RayWorkers:
        """Join or start the cluster.

        Raises:
            MissingExtraError: Ray is not installed.
            RankError: there is no cluster at the address.
        """
        return RayWorkers(self)


class RayWorkers:
    """A cluster in use."""

    def __init__(self, pool: RayPool) -> None:
        # Nothing is reported to anybody, whatever the cluster's default is.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = import_extra("ray", extra="cluster", purpose="the ray pool")
        self._owns = not self._ray.is_initialized()
        if self._owns:
            try:
                if pool.address:
                    self._ray.init(address=pool.address, log_to_driver=False)
                else:
                    self._ray.init(
                        num_cpus=pool.workers or num_cores(),
                        include_dashboard=False,
                        log_to_driver=False,
                    )
            except (ConnectionError, OSError, RuntimeError, ValueError) as cause:
                raise RankError(
                    f"pool.ray.address = {pool.address!r}: no Ray cluster could be used ({cause}); "
                    "start one with 'ray start --head', or leave the address empty"
                ) from cause
        # A call that died is reported, not silently run again.
        options = {"num_cpus": pool.cpus_per_call, "max_retries": 0}
        self._run_call = self._ray.remote(run_call).options(**options)
        self._target = self._ray.remote(_Target).options(
            num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._pending: set[Future[Any]] = set()
        self._actors: list[RayActor] = []
        self._closed = False

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call ``function`` wherever the cluster has room."""
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        name = name_of(function)
        reference = self._run_call.remote(pack_call(function, args, kwargs))
        future: Future[_T] = _future(reference, "pool worker", name)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def map(self, function: Callable[..., _T], /, *iterables: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments."""
        return ordered_map(self, function, iterables)

    def actor(self, cls: type[Any], /, *args: Any, **kwargs: Any) -> RayActor:
        """Construct an object in a process of its own."""
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        name = f"actor {len(self._actors)} ({name_of(cls)})"
        actor = RayActor(self._ray, self._target.remote(), name)
        self._actors.append(actor)
        try:
            actor.construct(cls, args, kwargs)
        except BaseException:
            actor.close()
            raise
        return actor

    def close(self, *, now: bool = False) -> None:
        """Finish what was submitted, or give it up, and leave or end the cluster."""
        if self._closed:
            return
        self._closed = True
        if not now:
            for future in list(self._pending):
                future.exception()  # waits; the caller holds the result
        for actor in self._actors:
            actor.close()
        if self._owns:
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(now=error is not None)


class RayActor:
    """An object in a process of the cluster."""

    def __init__(self, ray: Any, handle: Any, name: str) -> None:
        self._ray = ray
        self._handle = handle
        self._name = name
        self._closed = False

    def construct(self, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the object and wait for it."""
        reference = self._handle.construct.remote(pack_call(cls, args, kwargs))
        _future(reference, f"pool {self._name}", "its constructor").result()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the object."""
        require(not self._closed, self._name, "closed", expected="an open actor", error=RankError)
        reference = self._handle.run.remote(pack_call(method, args, kwargs))
        return _future(reference, f"pool {self._name}", method)

    def close(self) -> None:
        """End the process; calls that have not finished fail."""
        if not self._closed:
            self._closed = True
            self._ray.kill(self._handle)


class _Target:
    """The actor as Ray sees it: a place for the user's object."""

    def construct(self, payload: bytes) -> bytes:
        self._object, outcome = construct(payload)
        return outcome

    def run(self, payload: bytes) -> bytes:
        return run_method(self._object, payload)


def _future(reference: Any, where: str, doing: str) -> Future[Any]:
    """A future of the unpacked outcome of a Ray call."""
    unpacked: Future[Any] = Future()
    unpacked.set_running_or_notify_cancel()

    def finish(packed: Future[bytes]) -> None:
        try:
            unpacked.set_result(unpack_outcome(packed.result(), where))
        except Exception as error:
            if type(error).__module__.startswith("ray."):
                told = " ".join(str(error).split())
                lost = RankError(f"{where} died while running {doing}: {told}")
                lost.__cause__ = error
                unpacked.set_exception(lost)
            else:
                unpacked.set_exception(error)

    reference.future().add_done_callback(finish)
    return unpacked
