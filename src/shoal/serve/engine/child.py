"""A process that serves a part of what this one does, at the end of a socket of its own."""

from __future__ import annotations

import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core import children
from shoal.core.errors import ServeError
from shoal.serve.engine.frames import PRIVATE, Decoder, encode
from shoal.serve.ranks.spinning import spin_briefly

_READ_BYTES = 2**20
# s without a word from a process that is waited for, or without room for what it is sent.
_SILENT_S = 600.0


def readable(children: Sequence[Child]) -> list[Child]:
    """Those that have sent something, once one has.

    Raises:
        ServeError: none does for ten minutes.
    """
    there = select.select([child.socket for child in children], [], [], _SILENT_S)[0]
    if not there:
        raise _silent(children)
    return [child for child in children if child.socket in there]


def _silent(children: Sequence[Child]) -> ServeError:
    names = ", ".join(f"{child.name} (process {child.process.pid})" for child in children)
    return ServeError(f"no sign within {_SILENT_S:g} s of the {names}: it blocks")


class Child:
    """A process of one instance.

    Args:
        name: what messages call it.
        message: ``start``, the first one it is sent.
        role: what it does, for the process that started it.
        module: what it runs; its socket is given by ``--fd``.

    Raises:
        ServeError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        message: Mapping[str, Any],
        *,
        role: str = "",
        module: str = "shoal.serve.cluster.phase",
    ) -> None:
        self.name, self.role = name, role
        own, theirs = socket.socketpair()
        environment = children.environment(without=PRIVATE)
        spin_briefly(environment)
        try:
            self.process = children.start(
                module,
                *("--fd", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        except OSError as cause:
            own.close()
            raise ServeError(f"the {self.name} cannot be started ({cause})") from cause
        finally:
            theirs.close()
        self.socket = own
        self.socket.settimeout(_SILENT_S)
        self.decoder = Decoder()
        self.ready: dict[str, Any] = {}
        self.stats: dict[str, float] = {}
        self.open = 0
        self.heard = time.monotonic()
        self.send(message)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send; ServeError when the process is gone."""
        try:
            self.socket.sendall(encode(message))
        except TimeoutError:
            raise _silent([self]) from None
        except OSError:
            raise self.died() from None

    def receive(self) -> list[dict[str, Any]]:
        """What is here; the end of the process is an error."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except TimeoutError:
            raise _silent([self]) from None
        except OSError:
            data = b""
        if not data:
            raise self.died()
        self.heard = time.monotonic()
        result = list(self.decoder.feed(data))
        for message in result:
            if message["kind"] == "failed":
                raise ServeError(f"the {self.name} failed: {message['message']}")
        return result

    def answer(self, kind: str) -> dict[str, Any]:
        """The next message of a kind; others, which are of requests that ended, are dropped."""
        while True:
            for message in self.receive():
                if message["kind"] == kind:
                    return message

    def died(self) -> ServeError:
        """It closed its end."""
        try:
            status: int | None = self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            status = None
        end = "closed its connection" if status is None else f"died (status {status})"
        return ServeError(
            f"the {self.name} (process {self.process.pid}) {end}; its requests are lost, and the "
            "others are ended with it"
        )

    def close(self) -> None:
        """End the process."""
        self.socket.close()
        children.kill([self.process])
