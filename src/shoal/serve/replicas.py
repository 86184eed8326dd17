"""Replicas of a server, each a process with an engine of its own: started, watched, replaced.

A replica is asked for its health again and again. One that has gone, or gives no sign of life
for too long, is killed and started again: at once the first time, later after each failure in a
row. What it was answering breaks off, which the router sees at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ServeError, require
from shoal.ir.job import ServeJob
from shoal.serve.replica import FAILED, start_message
from shoal.serve.server import ServerOptions
from shoal.serve.upstream import Answered, LostError, ask

__all__ = ["Replica", "Replicas", "WatchOptions"]

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
        number: from 0.
        start: what it is told when it starts.
        watch: how it is watched.
        start_s: s that it may take to start.
    """

    def __init__(self, number: int, start: bytes, watch: WatchOptions, start_s: float) -> None:
        self.number = number
        self.ready = False
        self.restarts = 0
        self.num_open = 0
        self._start = start
        self._watch = watch
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._suspect = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Its process, if one runs."""
        return None if self._process is None else self._process.pid

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
    ) -> AsyncGenerator[Answered, None]:
        """See :func:`shoal.serve.upstream.ask`; a replica that cannot be reached is looked at."""
        if self._directory is None:
            raise LostError(f"replica {self.number} does not run")
        socket = str(self._directory / "socket")
        try:
            async with ask(socket, method, target, headers=headers, body=body) as answered:
                yield answered
        except LostError:
            self._suspect.set()
            raise

    async def start(self) -> None:
        """Start the process and wait until it takes requests.

        Raises:
            ServeError: it cannot, with the reason.
        """
        # A path of a socket has at most 107 characters.
        directory = Path(tempfile.mkdtemp(prefix=f"shoal-replica{self.number}-"))  # mode 0700
        self._directory = directory
        private = {"SHOAL_API_KEY", "TMPDIR"}
        environment = {name: text for name, text in os.environ.items() if name not in private}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.serve.replica", "--socket", str(directory / "socket")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # What it leaves behind when it is killed goes with its directory.
            env={**environment, "TMPDIR": str(directory)},
            start_new_session=True,  # Ctrl-C is for the router, which ends its replicas
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin:
            self._process.stdin.write(self._start)
        end = time.monotonic() + self._start_s
        while not await self._starts():
            if self._process.poll() is not None:
                raise ServeError(f"replica {self.number} did not start: {self._reason()}")
            if time.monotonic() > end:
                raise ServeError(
                    f"replica {self.number} did not load its model within {self._start_s:g} s"
                )
            await asyncio.sleep(_LOOK_S)
        self._suspect.clear()
        self.ready = True

    async def _starts(self) -> bool:
        """Whether it takes requests already; one that loads may be slow to say."""
        try:
            return await self._healthy()
        except TimeoutError:
            return False

    def _reason(self) -> str:
        assert self._directory is not None and self._process is not None
        told = self._directory / FAILED
        if told.exists():
            return told.read_text(encoding="utf-8")
        return f"its process ended with status {self._process.returncode}"

    async def _healthy(self) -> bool:
        """Whether it says that it takes requests; TimeoutError if it hangs."""
        with contextlib.suppress(LostError):
            async with asyncio.timeout(self._watch.hang_s), self.ask("GET", "/health") as answered:
                return answered.status == 200
        return False

    async def gone(self) -> str:
        """Watch until it is gone or hangs; returns what happened."""
        assert self._process is not None
        while self._process.poll() is None:
            try:
                self.ready = await self._healthy()
            except TimeoutError:
                return f"replica {self.number} gives no sign of life"
            self._suspect.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch.check_s):
                    await self._suspect.wait()
        return f"replica {self.number} died with status {self._process.returncode}"

    def kill(self) -> None:
        """End the process now."""
        self.ready = False
        if self._process is not None:
            self._process.kill()

    async def stop(self, *, gently: bool = True) -> None:
        """End the process and remove what belongs to it."""
        self.ready = False
        process, self._process = self._process, None
        if process is not None:
            if gently:
                process.terminate()
                end = time.monotonic() + _LEAVE_S
                while process.poll() is None and time.monotonic() < end:
                    await asyncio.sleep(_LOOK_S)
            process.kill()
            await asyncio.to_thread(process.wait)
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


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
        start = start_message(job, options)
        self.all = [
            Replica(number, start, self._watch, options.client.start_s)
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
            ServeError: one cannot.
        """
        starting = [asyncio.create_task(replica.start()) for replica in self.all]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        self._keeping = [asyncio.create_task(self._keep(replica)) for replica in self.all]

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
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self.all))

    async def _keep(self, replica: Replica) -> None:
        """Start a replica again whenever it is gone."""
        failures = 0
        while True:
            began = time.monotonic()
            what = await replica.gone()
            failures = 0 if time.monotonic() - began > _STEADY_S else failures
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
                except (ServeError, OSError, TimeoutError) as cause:
                    log.error("%s", cause)
                else:
                    log.warning("replica %d runs again", replica.number)
                    break
