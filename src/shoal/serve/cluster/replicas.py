"""Replicas of a server, each a process with an engine of its own: started, watched, replaced.

A replica is asked for its health again and again. One that has gone, or does not respond
for too long, is killed and started again: at once the first time, later after each failure in a
row before it has answered anything. What it was answering breaks off, which the router sees at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass

from shoal.core.errors import ServeError, ShoalError, require
from shoal.core.pool import POOLS, ActorResources, Pool
from shoal.core.traits import traits
from shoal.ir.serve_job import ServeJob
from shoal.serve.cluster.hosting import LocalReplica, PoolReplica, ReplicaHandle
from shoal.serve.cluster.replica import start_message
from shoal.serve.cluster.upstream import ServerLostError, UpstreamResponse, ask
from shoal.serve.http.server import ServerOptions

log = logging.getLogger("shoal.serve")

# s between two looks at a replica that is loading, and for which one may take to end.
_LOOK_S = 0.05
_LEAVE_S = 10.0
_STEADY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How replicas are watched.

    Args:
        check_s: s between two questions for the health of a replica.
        hang_s: s without an answer after which it is killed.
        backoff_s: s before the second restart in a row; twice as long after each.
        max_backoff_s: longest wait before a restart.
    """

    check_s: float = 0.5
    hang_s: float = 10.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            where = f"replicas.{item.name}"
            require(value > 0, where, value, expected="more than 0", error=ServeError)


class Replica:
    """One replica: its process, and whether it takes requests.

    Args:
        watch: its health checks.
        start_s: s that it may take to start.
    """

    def __init__(
        self, number: int, host: Callable[[int], ReplicaHandle], watch: WatchOptions, start_s: float
    ) -> None:
        self.number = number
        self.ready = False
        self.restarts = 0
        self.num_open = 0
        self.answered = False  # anything since it last started
        self._host = host
        self._watch = watch
        self._start_s = start_s
        self._hosted: ReplicaHandle | None = None
        self._suspect = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process, if one runs."""
        return None if self._hosted is None else self._hosted.pid

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """A request is open here for as long as the block takes."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> AsyncGenerator[UpstreamResponse, None]:
        """See :func:`shoal.serve.cluster.upstream.ask`; checks a replica that it cannot reach."""
        hosted = self._hosted
        if hosted is None:
            raise ServerLostError(f"replica {self.number} does not run")
        headers = {**(headers or {}), **hosted.headers}
        try:
            async with ask(hosted.server, method, target, headers=headers, body=body) as answered:
                self.answered = self.answered or (method == "POST" and answered.status == 200)
                yield answered
        except ServerLostError:
            self._suspect.set()
            raise

    async def start(self) -> None:
        """Start the process and wait until it takes requests.

        Raises:
            ShoalError: it cannot, with the reason.
        """
        making = asyncio.ensure_future(asyncio.to_thread(self._host, self.number))
        try:
            hosted = self._hosted = await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.to_thread((await making).close)
            raise
        end = time.monotonic() + self._start_s
        while not await self._starts():
            if (reason := hosted.ended()) is not None:
                raise ServeError(f"replica {self.number} did not start: {reason}")
            if time.monotonic() > end:
                raise ServeError(
                    f"replica {self.number} did not load its model within {self._start_s:g} s"
                )
            await asyncio.sleep(_LOOK_S)
        self._suspect.clear()
        self.answered, self.ready = False, True

    async def _starts(self) -> bool:
        """Whether it takes requests already; one that loads may be slow to say."""
        try:
            return await self._healthy()
        except TimeoutError:
            return False

    async def _healthy(self) -> bool:
        """Whether it says that it takes requests; TimeoutError if it hangs."""
        with contextlib.suppress(ServerLostError):
            async with asyncio.timeout(self._watch.hang_s), self.ask("GET", "/health") as answered:
                return answered.status == 200
        return False

    async def gone(self) -> str:
        """Watch until it is gone or hangs; returns what happened."""
        assert self._hosted is not None
        while (reason := self._hosted.ended()) is None:
            try:
                self.ready = await self._healthy()
            except TimeoutError:
                return f"replica {self.number} does not respond"
            self._suspect.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch.check_s):
                    await self._suspect.wait()
        return f"replica {self.number} is gone: {reason}"

    def kill(self) -> None:
        """End the process now."""
        self.ready = False
        if self._hosted is not None:
            self._hosted.kill()

    async def stop(self, *, gently: bool = True) -> None:
        """End the process and remove what belongs to it."""
        self.ready = False
        hosted, self._hosted = self._hosted, None
        if hosted is None:
            return
        if gently:
            hosted.terminate()
            end = time.monotonic() + _LEAVE_S
            while hosted.ended() is None and time.monotonic() < end:
                await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(hosted.close)


class Replicas:
    """All replicas of a job. ``on_gone`` is called with the number of one whose cache is lost.

    Args:
        job: what each serves; ``job.replicas`` of them.
        options: of their servers; address and key are the router's.
        watch: how they are watched.
    """

    def __init__(
        self, job: ServeJob, options: ServerOptions, *, watch: WatchOptions | None = None
    ) -> None:
        self._watch = watch or WatchOptions()
        self._job, self._options = job, options
        self._start = start_message(job, options)
        self._pool: Pool | None = None
        self.all = [
            Replica(number, self._host, self._watch, options.client.start_s)
            for number in range(job.replicas)
        ]
        self.on_gone: Callable[[int], None] = lambda _: None
        self.ended = ""
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Replica]:
        """Those that take requests now."""
        return [replica for replica in self.all if replica.ready]

    async def start(self) -> None:
        """Start all, and wait until each takes requests.

        Raises:
            ShoalError: one cannot, or there is no cluster to start it on.
        """
        if "remote" in traits("pool", self._job.launcher):
            await asyncio.to_thread(self._open)
        starting = [asyncio.create_task(replica.start()) for replica in self.all]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self._keeping = [asyncio.create_task(self._keep(replica)) for replica in self.all]

    def _open(self) -> None:
        """Open the pool of the launcher; replicas share a machine with those of it alone."""
        job = self._job
        pool: Pool = POOLS.build(job.launcher).open(_needs_of(job))
        self._pool = pool
        there = -(-job.replicas // pool.num_nodes)
        self._start = start_message(job.model_copy(update={"replicas": there}), self._options)

    def end_all(self, reason: str) -> None:
        """End every open answer with an error, and start nothing again."""
        self.ended = reason
        for task in self._keeping:
            task.cancel()
        for replica in self.all:
            replica.kill()

    async def stop(self) -> None:
        """End all."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*(replica.stop() for replica in self.all))
        if self._pool is not None:
            # One that waits for a node with room for it gives up when there is no pool any more.
            await asyncio.to_thread(self._pool.close, now=True)
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def _host(self, number: int) -> ReplicaHandle:
        """Start the process of a replica, here or wherever the launcher has room."""
        if self._pool is not None:
            return PoolReplica(self._pool, number, self._start)
        return LocalReplica(number, self._start)

    async def _keep(self, replica: Replica) -> None:
        """Start a replica again whenever it is gone."""
        failures = 0
        while True:
            began = time.monotonic()
            what = await replica.gone()
            steady = replica.answered or time.monotonic() - began > _STEADY_S
            failures = 0 if steady else failures
            log.error("%s; it is started again", what)
            while True:
                await replica.stop(gently=False)
                self.on_gone(replica.number)
                if failures:
                    pause = self._watch.backoff_s * 2.0 ** min(failures - 1, 30)
                    await asyncio.sleep(min(self._watch.max_backoff_s, pause))
                failures += 1
                replica.restarts += 1
                try:
                    await replica.start()
                except (ShoalError, OSError, TimeoutError) as cause:
                    log.error("%s", cause)
                else:
                    log.warning("replica %d runs again", replica.number)
                    break


def _needs_of(job: ServeJob) -> ActorResources:
    """What a replica takes of its node: a processor for each thread, or one for each rank."""
    ranks = job.parallel.world if job.disagg is None else job.disagg.devices
    return ActorResources(cpus=float(ranks * (job.threads or 1)))
