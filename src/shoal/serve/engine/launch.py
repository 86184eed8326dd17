"""An engine's process: it is started, read from while it runs, and ended.

It talks to the process that started it through a socket that it inherits, so nothing of it lies
in the file system, and nothing is left there however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from shoal.core import children
from shoal.core.errors import ServeError
from shoal.serve.engine.frames import DEFAULT_FACTORY, PRIVATE, encode
from shoal.serve.ranks.spinning import spin_briefly

if TYPE_CHECKING:
    from shoal.ir.serve_job import ServeJob

log = logging.getLogger("shoal.serve")

_TAIL_LINES = 40
_LINE_BYTES = 2**16
# How long a process may take to leave after it was killed.
_LEAVE_S = 5.0


@dataclass
class EngineProcess:
    """An engine's process.

    Args:
        process: its pipe of errors is read by :class:`EngineLog`.
        socket: to it.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def discard(self) -> None:
        """End the process."""
        self.socket.close()
        children.kill([self.process])
        if self.process.stderr is not None:
            self.process.stderr.close()

    def load(self, job: ServeJob, factory: str) -> None:
        """Say what to load; it does so while the caller gets ready itself.

        Raises:
            ServeError: it has ended.
        """
        message = {
            "kind": "start",
            "factory": factory,
            "job": job.model_dump(mode="json", exclude_none=True),
        }
        self.socket.settimeout(_LEAVE_S)  # it may not read yet
        try:
            self.socket.sendall(encode(message))
        except OSError as cause:
            raise ServeError(f"the engine's process has ended ({cause})") from cause
        self.socket.setblocking(False)


def begin() -> EngineProcess:
    """Start an engine's process, which imports modules until it receives its job.

    Imports no values itself, so that it can be called before anything else is.

    Raises:
        ServeError: the process cannot be started.
    """
    environment = children.environment(without=PRIVATE)
    spin_briefly(environment)
    own, theirs = socket.socketpair()
    try:
        process = children.start(
            "shoal.serve.engine.process",
            *("--fd", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    except OSError as cause:
        own.close()
        raise ServeError(f"the engine's process cannot be started ({cause})") from cause
    finally:
        theirs.close()
    return EngineProcess(process, own)


def launch(
    job: ServeJob, factory: str = DEFAULT_FACTORY, begun: EngineProcess | None = None
) -> EngineProcess:
    """Start an engine's process, and say what to load.

    Args:
        job: what to serve.
        factory: ``module:function`` that builds the engine from the job, in its process.
        begun: a process of :func:`begin` to take, if it has not ended.

    Raises:
        ServeError: the process cannot be started.
    """
    if begun is None or begun.process.poll() is not None:
        begun = begin()
    try:
        begun.load(job, factory)
    except ServeError:
        begun.discard()
        raise
    return begun


class EngineLog:
    """What an engine prints: it goes to the log, and the end of it is remembered."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._task = asyncio.create_task(self._keep(process), name="engine log")

    @property
    def last(self) -> str:
        """To be added to an error; nothing if it printed nothing."""
        words = "\n".join(self._tail).strip()
        return f"; its last output:\n{words}" if words else ""

    async def finish(self) -> None:
        """Wait for the end of what a killed engine printed, before its pipe is closed."""
        await asyncio.wait([self._task], timeout=_LEAVE_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep(self, process: subprocess.Popen[bytes]) -> None:
        pipe: IO[bytes] | None = process.stderr
        assert pipe is not None
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            rest = b""
            while data := await reader.read(_LINE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                lines += [rest] if len(rest) > _LINE_BYTES else []
                rest = b"" if len(rest) > _LINE_BYTES else rest
                for line in lines:
                    text = line.decode(errors="replace")
                    self._tail.append(text)
                    log.warning("engine: %s", text)
        finally:
            transport.close()
