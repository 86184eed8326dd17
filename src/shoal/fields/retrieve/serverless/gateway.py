"""The gateway: gives each call a container that is free and warm, or starts one."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from shoal.core.errors import ShoalError
from shoal.core.parts import Choice, table
from shoal.fields.retrieve.serverless.functions import PROCESSOR, answer_of
from shoal.fields.retrieve.serverless.http import FunctionServer
from shoal.fields.retrieve.serverless.invoking import ThreadInvoker
from shoal.fields.retrieve.serverless.protocols import (
    LIMIT_S,
    ContainerSetup,
    FunctionBackend,
    FunctionCall,
    FunctionContainer,
    FunctionError,
    FunctionReply,
)


class FunctionGateway(ThreadInvoker):
    """A :class:`FunctionRuntime` over the containers of a back-end.

    A container has one call at a time and belongs to one function; it stays until the end and keeps
    what it has read.

    Args:
        backend: name of a part of kind ``function_backend``, or the part.
        directory: of an index, as :func:`~shoal.fields.retrieve.index.osq.files.save_index` writes
            it.
        latency_s: that each dispatch of a call holds its caller.
        copies: containers of a processor at a time; further calls of it wait.
        most: containers at a time.

    Raises:
        ShoalError: the back-end cannot be used.
    """

    def __init__(
        self,
        backend: FunctionBackend | Choice | str,
        directory: Path | str,
        *,
        latency_s: float = 0.0,
        copies: int = 4,
        most: int = 2048,
    ) -> None:
        super().__init__(latency_s)
        if not 0 <= latency_s < 60 or copies < 1 or most < 1:
            raise FunctionError(
                f"latency_s = {latency_s}, copies = {copies}, most = {most}: expected seconds "
                "below 60, and at least one container"
            )
        part: FunctionBackend = (
            table("function_backend").build(backend, where="backend")
            if isinstance(backend, Choice | str)
            else backend
        )
        self._host = part.open()
        token = secrets.token_hex(16)
        try:
            self._server = FunctionServer(self._answer, token, self._host.address)
        except BaseException:
            self._host.close()
            raise
        self._setup = ContainerSetup(
            str(Path(directory).absolute()), self._server.address, token, latency_s
        )
        self._most, self._copies = most, copies
        self._changed = threading.Condition()
        self._idle: defaultdict[str, list[tuple[int, FunctionContainer]]] = defaultdict(list)
        self._running: Counter[str] = Counter()
        self._started = 0
        self._closed = False

    def _run(self, name: str, payload: Mapping[str, Any]) -> FunctionReply:
        number, container, cold_s = self._take(name)
        try:
            answer = answer_of(container.call(name, json.dumps(payload)))
        except BaseException:
            # What it was doing is unknown: it may hang, or have ended.
            self._gone(name)
            container.close()
            raise
        with self._changed:
            self._idle[name].append((number, container))
            self._changed.notify_all()
        call = FunctionCall(
            name=name,
            container=number,
            cold=cold_s > 0,
            cold_s=cold_s,
            seconds=answer["seconds"],
            read_bytes=answer["read_bytes"],
            retained=answer["retained"],
        )
        return FunctionReply(answer["result"], (call, *answer["calls"]))

    def _take(self, name: str) -> tuple[int, FunctionContainer, float]:
        """A container for a call, and the seconds that its start took."""
        # An allocator waits for those below, which must not wait for it.
        limit = self._copies if name.startswith(PROCESSOR) else self._most
        end = time.monotonic() + LIMIT_S
        with self._changed:
            while not self._idle[name] and self._running[name] >= limit and not self._closed:
                if not self._changed.wait(end - time.monotonic()):
                    raise FunctionError(f"{name}: no container was free for {LIMIT_S:g} s")
            if self._closed:
                raise FunctionError("functions: the runtime is closed")
            if self._idle[name]:
                return *self._idle[name].pop(), 0.0
            number = self._reserved(name)
        begin = time.perf_counter()
        return number, self._new(name), time.perf_counter() - begin

    def _reserved(self, name: str) -> int:
        """Room for one more container, whose number is returned; the lock is held."""
        if self._running.total() >= self._most:
            raise FunctionError(
                f"functions: {self._most} containers are running; allow more, or give a smaller "
                "tree"
            )
        self._running[name] += 1
        self._started += 1
        return self._started

    def _new(self, name: str) -> FunctionContainer:
        """Start a container for which there is room."""
        try:
            return self._host.start(self._setup, self)
        except BaseException as cause:
            self._gone(name)
            if isinstance(cause, ShoalError):
                raise FunctionError(f"{name}: its container does not start: {cause}") from cause
            raise

    def _gone(self, name: str) -> None:
        with self._changed:
            self._running[name] -= 1
            self._changed.notify_all()

    def provision(self, name: str, count: int, *, at_once: int = 4) -> None:
        """Start containers of a function before they are called.

        Args:
            name: of the function.
            count: how many.
            at_once: that start at the same time.

        Raises:
            FunctionError: there is no room for them, or one does not start.
        """

        def start(_: int) -> None:
            with self._changed:
                number = self._reserved(name)
            container = self._new(name)
            with self._changed:
                self._idle[name].append((number, container))

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(start, range(count)))

    def _answer(self, name: str, payload: str) -> str:
        """A call that a function makes: its caller has waited for the dispatch already."""
        try:
            reply = self._run(name, json.loads(payload))
        except ValueError as cause:
            raise FunctionError(f"{name}: {cause}") from cause
        except ShoalError as cause:
            raise FunctionError(str(cause)) from cause
        calls = [one.model_dump() for one in reply.calls]
        return json.dumps({"result": reply.result, "calls": calls})

    @property
    def containers(self) -> int:
        """How many are running."""
        return self._running.total()

    def close(self) -> None:
        """End all containers."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            idle = [one for some in self._idle.values() for _, one in some]
        self._server.close()
        for container in idle:
            container.close()
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
