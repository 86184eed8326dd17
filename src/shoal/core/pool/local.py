"""A pool of processes on this machine.

Each worker process has a thread here that feeds it: the thread sends one call and waits
for its outcome or for the process to end, so a death is noticed by the caller that waits for
it. A dead worker is replaced for the next call. Processes are spawned, never forked: a
fork copies locks that other threads hold.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

from annotated_types import Ge

from shoal.core import children
from shoal.core.child import die_with_parent
from shoal.core.errors import RankError, require
from shoal.core.measure import num_cores
from shoal.core.parts import part
from shoal.core.pool.protocols import START_S, ActorResources, await_object, ordered_map
from shoal.core.pool.remote import (
    construct,
    name_of,
    pack_call,
    run_call,
    run_method,
    unpack_outcome,
)

_T = TypeVar("_T")
_READY = b"ready"
# How long a Ctrl-C can go unnoticed that comes just as a wait begins.
_GLANCE_S = 0.2


@part
class LocalPool:
    """Worker processes on this machine.

    Args:
        workers: number of processes; 0 for one per core.
    """

    workers: Annotated[int, Ge(0)] = 0

    def open(self, needs: ActorResources = ActorResources()) -> LocalWorkers:  # noqa: B008 - one machine
        """Start the processes; they get ready in the background."""
        return LocalWorkers(self.workers or num_cores())


class LocalWorkers:
    """The running processes of a :class:`LocalPool`."""

    num_nodes = 1

    def __init__(self, num_workers: int) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = [_Worker(f"worker {number}", self._calls) for number in range(num_workers)]
        self._actors: list[LocalActor] = []
        self._closed = False

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Call ``function`` on the next free worker."""
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        call = _Call(name_of(function), pack_call(function, args, kwargs), _Outcome())
        self._calls.put(call)
        return call.future

    def map(self, function: Callable[..., _T], /, *iterables: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments."""
        return ordered_map(self, function, iterables)

    def actor(self, cls: type[Any], /, *args: Any, **kwargs: Any) -> LocalActor:
        """Construct an object in a process of its own."""
        require(not self._closed, "pool", "closed", expected="an open pool", error=RankError)
        actor = LocalActor(f"actor {len(self._actors)} ({name_of(cls)})")
        self._actors.append(actor)
        try:
            actor.construct(cls, args, kwargs)
        except BaseException:
            actor.close()
            raise
        return actor

    def close(self, *, now: bool = False) -> None:
        """Finish what was submitted, or give it up, and end all processes."""
        if self._closed:
            return
        self._closed = True
        if now:
            _give_up(self._calls)
        for _ in self._workers:
            self._calls.put(None)
        for worker in self._workers:
            worker.close(now=now)
        for actor in self._actors:
            actor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(now=error is not None)


class _Outcome(Future[Any]):
    """A future for which one waits with an eye on Ctrl-C.

    A signal that comes between the interpreter's last look and the sleep of a lock without a time
    limit, or in another thread, is not noticed before the lock is free.
    """

    def result(self, timeout: float | None = None) -> Any:
        """What the call returned."""
        return super().result(self._watched(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised."""
        return super().exception(self._watched(timeout))

    def _watched(self, timeout: float | None) -> float | None:
        """Wait, if that has no limit, until there is something to be had at once."""
        while timeout is None and not self.done():
            wait_for_futures((self,), _GLANCE_S)
        return timeout


class LocalActor:
    """An object in a process of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._worker = _Worker(name, self._calls, restarts=False)
        self._closed = False

    def construct(
        self,
        cls: type[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        limit_s: float = START_S,
    ) -> None:
        """Make the object and wait for it.

        Raises:
            RankError: the process is not ready within ``limit_s``.
        """
        made = self._put(_Call("its constructor", pack_call(cls, args, kwargs), _Outcome()))
        await_object(made, self._name, limit_s)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the object."""
        return self._put(_Call(method, pack_call(method, args, kwargs), _Outcome()))

    def close(self) -> None:
        """End the process; calls that have not finished fail."""
        if not self._closed:
            self._closed = True
            _give_up(self._calls)
            self._calls.put(None)
            self._worker.close(now=True)

    def _put(self, call: _Call) -> Future[Any]:
        require(not self._closed, self._name, "closed", expected="an open actor", error=RankError)
        self._calls.put(call)
        return call.future


@dataclass(frozen=True)
class _Call:
    name: str
    payload: bytes
    future: Future[Any]


class _DiedError(Exception):
    """The process at the other end is gone."""


class _Worker:
    """One process and the thread that feeds it from a queue.

    Args:
        name: names it in errors.
        calls: where the calls come from; None ends the thread.
        restarts: a dead process is replaced for the next call. Otherwise (an actor,
            whose object died with it) every later call fails.
    """

    def __init__(
        self, name: str, calls: queue.SimpleQueue[_Call | None], *, restarts: bool = True
    ) -> None:
        self._name = name
        self._calls = calls
        self._restarts = restarts
        self._ready = False
        self._ending = False
        self._lock = threading.Lock()  # of _process and _pipe, against close()
        self._process, self._pipe = self._start()
        self._thread = threading.Thread(target=self._feed, name=f"pool {name}", daemon=True)
        self._thread.start()

    def close(self, *, now: bool) -> None:
        """Wait until the queue gives None (``now``: kill what runs), then end the process."""
        with self._lock:
            self._ending = now
            if now:
                self._process.kill()
        self._thread.join()
        self._pipe.close()  # an idle process ends when its pipe does
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _start(self) -> tuple[SpawnProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, not self._restarts, os.getpid()),
            name=self._name,
            daemon=True,
        )

        def begin() -> None:
            # Until it ignores Ctrl-C itself, the new process inherits that it is held back.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # Nothing is imported from the working directory by it, or by what tracks its resources.
            before = os.environ.get(children.SAFE_PATH)
            os.environ[children.SAFE_PATH] = "1"
            try:
                process.start()
            finally:
                if before is None:
                    del os.environ[children.SAFE_PATH]
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        children.from_lasting_thread(begin, lambda _: process.kill())
        theirs.close()
        self._ready = False
        return process, ours

    def _feed(self) -> None:
        epitaph = ""
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if epitaph and not self._restarts:
                    raise _DiedError
                if epitaph:
                    self._restart()
                    epitaph = ""
                outcome = self._exchange(call.payload)
            except _DiedError:
                epitaph = epitaph or self._epitaph(call.name)
                call.future.set_exception(RankError(epitaph))
                continue
            except OSError as cause:  # no process or no pipe to be had
                call.future.set_exception(
                    RankError(f"pool {self._name}: no process could be started ({cause})")
                )
                continue
            try:
                call.future.set_result(unpack_outcome(outcome, f"pool {self._name}"))
            except BaseException as error:
                call.future.set_exception(error)

    def _restart(self) -> None:
        with self._lock:
            if self._ending:
                raise _DiedError
            self._pipe.close()
            self._process.close()
            self._process, self._pipe = self._start()

    def _exchange(self, payload: bytes) -> bytes:
        if not self._ready and self._receive() == _READY:
            self._ready = True
        try:
            self._pipe.send_bytes(payload)
        except OSError as cause:
            raise _DiedError from cause
        return self._receive()

    def _receive(self) -> bytes:
        wait([self._pipe, self._process.sentinel])
        try:
            # What a process said before it died still counts.
            if self._pipe.poll():
                return self._pipe.recv_bytes()
        except (EOFError, OSError) as cause:
            raise _DiedError from cause
        raise _DiedError

    def _epitaph(self, doing: str) -> str:
        if self._ending:
            return f"pool {self._name}: was ended while running {doing}, because the pool closed"
        self._process.join(timeout=5)
        if self._process.exitcode is None:  # it closed its pipe but did not end
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        where = f"pool {self._name} (process {self._process.pid}) died with {how}"
        if not self._ready:
            return (
                f"{where} before it was ready; start pools under if __name__ == '__main__', "
                "from a file that can be imported"
            )
        hint = "; SIGKILL is often the kernel out of memory" if code == -signal.SIGKILL else ""
        return f"{where} while running {doing}{hint}"


def _give_up(calls: queue.SimpleQueue[_Call | None]) -> None:
    while True:
        try:
            call = calls.get_nowait()
        except queue.Empty:
            return
        if call is not None:
            call.future.cancel()
            call.future.set_running_or_notify_cancel()


def _serve(pipe: Connection, is_actor: bool, parent: int) -> None:
    """What a process does: answer calls until the pipe ends."""
    die_with_parent(parent)
    # Ctrl-C reaches the whole group of processes; the pool's owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send_bytes(_READY)
        if is_actor:
            target, outcome = construct(pipe.recv_bytes())
            pipe.send_bytes(outcome)
            while True:
                pipe.send_bytes(run_method(target, pipe.recv_bytes()))
        while True:
            pipe.send_bytes(run_call(pipe.recv_bytes()))
