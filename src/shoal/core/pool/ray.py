"""The same pool on Ray: one machine or a cluster.

Calls and outcomes are packed as for local processes, so results, exceptions and their
notes are the same; Ray only decides where they run. Functions and classes of the script
that runs go by value, since a worker of Ray runs another one.

A cluster that is started here lies in a directory of its own, and nothing of it is left
when the pool is closed or this process is killed.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Annotated, Any, ClassVar, Self, TypeVar

from annotated_types import Ge

from shoal.core.errors import RankError, require
from shoal.core.extras import import_extra
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.core.pool.protocols import ActorResources, await_object, ordered_map
from shoal.core.pool.remote import (
    construct,
    name_of,
    pack_call,
    run_call,
    run_method,
    unpack_outcome,
)
from shoal.core.pool.session import PoolSession

_T = TypeVar("_T")


@part
class RayPool:
    """Workers of a Ray cluster.

    Args:
        address: address of a running cluster (``auto`` finds it); empty uses ``$RAY_ADDRESS`` or,
            if that is not set, starts a cluster on this machine, which ends with the pool.
        workers: processors of a cluster started on this machine; 0 for all cores.
        cpus_per_call: processors that Ray reserves for one call.
        cpus_per_actor: processors that Ray reserves for an actor, such as a replica or a rank; None
            for the actor's own requirement.
        gpus_per_actor: GPUs that Ray reserves for an actor; each actor sees only its own GPUs.
        room_s: s that an actor waits for a node with free resources.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"remote"})
    address: str = ""
    workers: Annotated[int, Ge(0)] = 0
    cpus_per_call: Annotated[float, Ge(0)] = 1.0
    cpus_per_actor: Annotated[float, Ge(0)] | None = None
    gpus_per_actor: Annotated[float, Ge(0)] | None = None
    room_s: Annotated[float, Ge(0)] = 60.0

    def open(self, needs: ActorResources = ActorResources()) -> RayWorkers:  # noqa: B008 - frozen
        """Join or start the cluster.

        Args:
            needs: of each actor, where the options do not say it.

        Raises:
            MissingExtraError: Ray is not installed.
            RankError: there is no cluster at the address.
        """
        cpus = needs.cpus if self.cpus_per_actor is None else self.cpus_per_actor
        gpus = needs.gpus if self.gpus_per_actor is None else self.gpus_per_actor
        return RayWorkers(self, ActorResources(cpus=cpus, gpus=gpus))


class RayWorkers:
    """A cluster in use."""

    def __init__(self, pool: RayPool, needs: ActorResources) -> None:
        # No usage is reported, whatever the cluster's default is.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = import_extra("ray", extra="cluster", purpose="the ray pool")
        self._owns = not self._ray.is_initialized()
        self._session: PoolSession | None = None
        if self._owns:
            self._begin(pool)
        self._room_s = pool.room_s
        self._needs = needs
        # A call that died is reported, not silently run again.
        options = {"num_cpus": pool.cpus_per_call, "max_retries": 0}
        self._run_call = self._ray.remote(_run_call).options(**options)
        self._target = self._ray.remote(_Target)
        self._pending: set[Future[Any]] = set()
        self._actors: list[RayActor] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def _begin(self, pool: RayPool) -> None:
        address = pool.address or os.environ.get("RAY_ADDRESS", "")
        handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            if address:
                self._ray.init(address=address, log_to_driver=False, logging_level="WARNING")
                return
            self._session = PoolSession()
            self._ray.init(
                num_cpus=pool.workers or num_cores(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="WARNING",
                _temp_dir=str(self._session.inner),
            )
        except (ConnectionError, OSError, RuntimeError, ValueError) as cause:
            if self._session is not None:
                self._session.close()
            raise RankError(
                f"pool.ray.address = {address!r}: no Ray cluster could be used ({cause}); "
                "start one with 'ray start --head', or leave the address empty"
            ) from cause
        finally:
            # Ray takes them over and ends this process at once.
            if threading.current_thread() is threading.main_thread():
                for one, handler in handlers.items():
                    if handler is not None:
                        signal.signal(one, handler)

    @property
    def address(self) -> str:
        """The address by which the cluster knows this machine."""
        return str(self._ray.util.get_node_ip_address())

    @property
    def nodes(self) -> list[dict[str, float]]:
        """What each living node of the cluster has: processors as ``CPU``, GPUs as ``GPU``."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    @property
    def num_nodes(self) -> int:
        """Living nodes of the cluster."""
        return max(1, len(self.nodes))

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call ``function`` wherever the cluster has room."""
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        name = name_of(function)
        reference = self._run_call.remote(pack_call(function, args, kwargs, _sent))
        future: Future[_T] = _future(reference, "pool worker", name)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def map(self, function: Callable[..., _T], /, *iterables: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments."""
        return ordered_map(self, function, iterables)

    def actor(self, cls: type[Any], /, *args: Any, **kwargs: Any) -> RayActor:
        """Construct an object in a process of its own, on a node that has what actors need.

        Raises:
            RankError: no node has room for it.
        """
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        name = f"actor {next(self._numbers)} ({name_of(cls)})"
        end = time.monotonic() + self._room_s
        while True:
            actor = self._new_actor(name)
            try:
                # The pool may have been closed by another thread, which did not know this one.
                require(not self._closed, "pool", "closed", expected="open", error=RankError)
                actor.place(max(0.0, end - time.monotonic()), self._lacking)
                actor.construct(cls, args, kwargs)
                return actor
            except BaseException:
                actor.close()
                # Ray gives places on a lost node away until it notices the loss.
                if not actor.lost or time.monotonic() > end:
                    raise

    def _new_actor(self, name: str) -> RayActor:
        with self._lock:
            self._actors = [actor for actor in self._actors if not actor.closed]
            node = self._emptiest()
            handle = self._target.options(
                num_cpus=self._needs.cpus,
                num_gpus=self._needs.gpus,
                max_restarts=0,
                scheduling_strategy="SPREAD" if node is None else self._near(node),
            ).remote()
            actor = RayActor(self._ray, handle, name, node)
            self._actors.append(actor)
            return actor

    def _emptiest(self) -> str | None:
        """The node that has the fewest actors of this pool among those with room for one more."""
        held = Counter(actor.node for actor in self._actors)
        needs = {"CPU": self._needs.cpus, "GPU": self._needs.gpus}
        fitting = [
            node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
            and all(
                node["Resources"].get(kind, 0.0) >= need * (1 + held[node["NodeID"]])
                for kind, need in needs.items()
            )
        ]
        return min(fitting, key=lambda node: held[node], default=None)

    def _near(self, node: str) -> Any:
        """On that node, or elsewhere if others have taken what is needed there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)

    def _lacking(self) -> str:
        """That no node has room, for an error."""
        have = [f"{n.get('CPU', 0):g} CPUs and {n.get('GPU', 0):g} GPUs" for n in self.nodes]
        return (
            f"no node has {self._needs.cpus:g} CPUs and {self._needs.gpus:g} GPUs free for it; the "
            f"nodes have {', '.join(have) or 'nothing'} in all; start fewer, let each need less "
            "(cpus_per_actor, gpus_per_actor), or add a node"
        )

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
        if self._session is not None:
            self._session.close()

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
    """An object in a process of the cluster.

    Attributes:
        address: of the node on which it is.
        node: the identity of that node in the cluster.
        closed: whether it was ended from here.
        lost: whether its process, or its node, was lost before anything was asked of it.
    """

    def __init__(self, ray: Any, handle: Any, name: str, node: str | None) -> None:
        self.address, self.node = "", node
        self._ray = ray
        self._handle = handle
        self._name = name
        self.closed = self.lost = False

    def place(self, room_s: float, lacking: Callable[[], str]) -> None:
        """Wait until a node takes the actor.

        Raises:
            RankError: none does in ``room_s`` s, or the actor is lost.
        """
        try:
            self.address, self.node = self._ray.get(self._handle.where.remote(), timeout=room_s)
        except self._ray.exceptions.GetTimeoutError as cause:
            raise RankError(f"pool {self._name}: after {room_s:g} s {lacking()}") from cause
        except self._ray.exceptions.RayError as cause:
            text = " ".join(str(cause).split())
            self.lost = True
            raise RankError(f"pool {self._name} died before it was used: {text}") from cause

    def construct(self, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the object and wait for it.

        Raises:
            RankError: it is not made within :data:`~shoal.core.pool.protocols.START_S`.
        """
        reference = self._handle.construct.remote(pack_call(cls, args, kwargs, _sent))
        await_object(_future(reference, f"pool {self._name}", "its constructor"), self._name)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the object."""
        require(not self.closed, self._name, "closed", expected="an open actor", error=RankError)
        reference = self._handle.run.remote(pack_call(method, args, kwargs, _sent))
        return _future(reference, f"pool {self._name}", method)

    def close(self) -> None:
        """End the process; calls that have not finished fail."""
        if not self.closed:
            self.closed = True
            self._ray.kill(self._handle)


class _Target:
    """The actor as Ray sees it: a place for the user's object."""

    def where(self) -> tuple[str, str]:
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def construct(self, payload: bytes) -> bytes:
        self._object, outcome = construct(payload, _answered)
        return outcome

    def run(self, payload: bytes) -> bytes:
        return run_method(self._object, payload, _answered)


def _run_call(payload: bytes) -> bytes:
    return run_call(payload, _answered)


def _sent(value: Any) -> bytes:
    """A call as a pickle, with what the script that runs defines by value.

    Raises:
        PicklingError: as of :func:`pickle.dumps`, also where Ray's own would do more.
    """
    data = pickle.dumps(value)
    return _by_value(value) if b"__main__" in data else data


def _answered(value: Any) -> bytes:
    """An outcome as a pickle; here, classes of the caller's script belong to no module."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError):
        return _by_value(value)


def _by_value(value: Any) -> bytes:
    from ray import cloudpickle

    packed: bytes = cloudpickle.dumps(value)
    return packed


def _future(reference: Any, where: str, doing: str) -> Future[Any]:
    """A future of the unpacked outcome of a Ray call."""
    unpacked: Future[Any] = Future()
    unpacked.set_running_or_notify_cancel()

    def finish(packed: Future[bytes]) -> None:
        try:
            unpacked.set_result(unpack_outcome(packed.result(), where))
        except Exception as error:
            if type(error).__module__.startswith("ray."):
                text = " ".join(str(error).split())
                lost = RankError(f"{where} died while running {doing}: {text}")
                lost.__cause__ = error
                unpacked.set_exception(lost)
            else:
                unpacked.set_exception(error)

    reference.future().add_done_callback(finish)
    return unpacked
