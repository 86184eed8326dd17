"""A replica's process, wherever it runs: started, asked how it is, ended.

On this machine it listens on a Unix socket in a directory that only its user can enter, and needs
no key. On another machine it listens on TCP, and wants a key that was made for it alone.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import children
from shoal.core.errors import RankError
from shoal.core.scratch import scratch
from shoal.serve.cluster.upstream import Tcp
from shoal.serve.engine.frames import PRIVATE, encode

if TYPE_CHECKING:
    from shoal.core.pool import Actor, Pool

# s in which a pool must find a place for a replica and start its process.
_START_S = 600.0

FAILED = "failed"
"""The file in which a replica says why it could not start."""


class ReplicaHandle(Protocol):
    """A replica that was started. Only making one and :meth:`close` may take their time."""

    server: str | Tcp
    headers: Mapping[str, str]
    pid: int

    def ended(self) -> str | None:
        """How it ended; None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it now."""

    def close(self) -> None:
        """End it if it runs, and remove what belongs to it."""


class ReplicaProcess:
    """The process on the machine where it runs.

    Args:
        start: what it receives: the message ``start``.
        host: address of this machine to listen on; without one, a Unix socket.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, number: int, start: Mapping[str, Any], host: str | None = None) -> None:
        self._directory = scratch(f"replica{number}", sockets=True)
        try:
            with _listener(self._directory, host) as listener:
                self.server: str | Tcp = (
                    str(listener.getsockname())
                    if host is None
                    else Tcp(host, listener.getsockname()[1])
                )
                fd = listener.fileno()
                self._process = children.start(
                    "shoal.serve.cluster.replica",
                    *("--fd", str(fd), "--folder", str(self._directory)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    # What it leaves behind when it is killed goes with its directory.
                    env=children.environment({"TMPDIR": str(self._directory)}, without=PRIVATE),
                    pass_fds=[fd],
                )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        # Ray kills a worker that has no driver any more, and at once all that it has started.
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin:
            self._process.stdin.write(encode(start))

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        if self._process.poll() is None:
            return None
        result = self._directory / FAILED
        if result.exists():
            return result.read_text(encoding="utf-8")
        return f"its process ended with status {self._process.returncode}"

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def close(self) -> None:
        """End it if it runs, and remove what belongs to it."""
        children.kill([self._process])
        shutil.rmtree(self._directory, ignore_errors=True)


def _listener(directory: Path, host: str | None) -> socket.socket:
    if host is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(directory / "socket"))
        return listener
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind((host, 0))
    return listener


class LocalReplica(ReplicaProcess):
    """A replica on this machine."""

    headers: Mapping[str, str] = {}


class _Remote:
    """The actor, on the machine where the replica runs."""

    def __init__(self, number: int, start: Mapping[str, Any]) -> None:
        self._process = ReplicaProcess(number, start, host=_own_address())

    def where(self) -> tuple[str, int, int]:
        """Host, port and process."""
        server = self._process.server
        assert isinstance(server, Tcp)
        return server.host, server.port, self._process.pid

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        return self._process.ended()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def close(self) -> None:
        """End it, and remove what belongs to it."""
        self._process.close()


def _own_address() -> str:
    """The address of this machine that the others of its cluster know."""
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None else "127.0.0.1"


class PoolReplica:
    """A replica in the process of an actor, which may be on another machine.

    Args:
        pool: of the actors.
        number: of the replica.
        start: what it receives: the message ``start``.

    Raises:
        RankError: it cannot be started there.
    """

    def __init__(self, pool: Pool, number: int, start: Mapping[str, Any]) -> None:
        key = secrets.token_hex(16)
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"}
        fields = {**start, "options": {**start["options"], "key": key}}
        self._actor: Actor = pool.actor(_Remote, number, fields)
        try:
            host, port, self.pid = self._actor.call("where").result(_START_S)
        except BaseException as cause:
            self._actor.close()
            if isinstance(cause, TimeoutError):
                raise RankError(
                    f"replica {number}: nothing started it within {_START_S:g} s"
                ) from None
            raise
        self.server: str | Tcp = Tcp(host, port)
        self._asked: Future[Any] = self._actor.call("ended")
        self._ended: str | None = None

    def ended(self) -> str | None:
        """How it ended, as known a moment ago; None while it runs."""
        if self._ended is None and self._asked.done():
            try:
                self._ended = self._asked.result()
                self._asked = self._actor.call("ended")
            except RankError as cause:  # the actor is gone, and its process with it
                self._ended = str(cause)
        return self._ended

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(RankError):
            self._actor.call("terminate")

    def kill(self) -> None:
        """End it now, by the end of the process that it belongs to."""
        self._actor.close()

    def close(self) -> None:
        """End it if it runs, and remove what belongs to it."""
        with contextlib.suppress(RankError, TimeoutError):
            self._actor.call("close").result(5.0)
        self._actor.close()
