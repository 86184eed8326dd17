"""Processes of a plane, and the messages that the server of a federation exchanges with them.

A process has one end of a socket for messages, JSON, and the listening socket at which requests
reach it. A thread reads what processes say. A process that ends closes its channel.
"""

from __future__ import annotations

import contextlib
import json
import queue
import selectors
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core import children
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.keys import parse_address

MESSAGE_BYTES = 1 << 16
"""Of a message at most."""

_START_S, _LEAVE_S = 60.0, 10.0


@dataclass
class Member:
    """A process of a plane.

    Args:
        process: that was started.
        channel: to it.
        port: at which it listens.
        answers: what it has said of itself.
    """

    process: subprocess.Popen[Any]
    channel: socket.socket
    port: int
    answers: queue.SimpleQueue[Mapping[str, Any] | None] = field(default_factory=queue.SimpleQueue)


class Channels:
    """All processes of a plane.

    Args:
        listen: address of which they listen to any port.
        heard: called, in a thread of its own, with the number of a process, the kind of a message
            and its words; the kind ``gone`` says that a process has ended.
    """

    def __init__(self, listen: str, heard: Callable[[int, str, dict[str, Any]], None]) -> None:
        self.host, _ = parse_address(listen)
        self._heard = heard
        self.members: list[Member] = []
        self._closing = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._listen, name="shoal-plane", daemon=True)

    def start(self, module: str, given: Mapping[str, Any], files: tuple[int, ...] = ()) -> int:
        """Start a process; its number.

        Args:
            module: dotted name; its command line takes its listener and its channel.
            given: what it reads from standard input, as JSON.
            files: descriptors that it inherits, too.
        """
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, 0), backlog=1024, family=family)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        with its, listener:
            process = children.start(
                module,
                str(listener.fileno()),
                str(its.fileno()),
                pass_fds=(listener.fileno(), its.fileno(), *files),
                stdin=subprocess.PIPE,
                text=True,
                env=children.environment({"OMP_NUM_THREADS": "1"}),
            )
        self.members.append(Member(process, mine, port))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its channel will say
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.close()
        return len(self.members) - 1

    def ready(self) -> None:
        """Wait for the first message of each, then begin to listen.

        Raises:
            FederationError: one has ended.
        """
        for at, member in enumerate(self.members):
            member.channel.settimeout(_START_S)
            try:
                data = member.channel.recv(MESSAGE_BYTES)
            except OSError:
                data = b""
            member.channel.settimeout(None)
            if not data:
                raise FederationError("plane: one of its processes did not start")
            self._selector.register(member.channel, selectors.EVENT_READ, at)
        self._thread.start()

    def say(self, at: int, kind: str, **words: Any) -> None:
        """Send a message.

        Raises:
            FederationError: the process is gone.
        """
        with self._lock:
            try:
                self.members[at].channel.send(json.dumps({"kind": kind, **words}).encode())
            except OSError as cause:
                raise self.gone(at) from cause

    def ask(self, at: int, kind: str) -> Mapping[str, Any]:
        """What a process says of itself.

        Raises:
            FederationError: it is gone, or is silent.
        """
        self.say(at, kind)
        try:
            answer = self.members[at].answers.get(timeout=_LEAVE_S)
        except queue.Empty:
            answer = None
        if answer is None:
            raise self.gone(at)
        return answer

    def facts(self) -> dict[str, float]:
        """Counters of all processes, added."""
        sums: dict[str, float] = {"up_bytes": 0.0}
        for at in range(len(self.members)):
            for name, value in self.ask(at, "facts").items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def gone(self, at: int) -> FederationError:
        """The error of a process that has ended."""
        return FederationError(
            f"plane: process {at} of {len(self.members)} has ended, and the updates with it that "
            "it had; see its last words above"
        )

    def _listen(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.5):
                member = self.members[key.data]
                try:
                    data = member.channel.recv(MESSAGE_BYTES)
                except OSError:
                    data = b""
                if not data:
                    self._selector.unregister(member.channel)
                    member.answers.put(None)
                    if not self._closing:
                        self._heard(key.data, "gone", {})
                    continue
                words = json.loads(data)
                kind = words.pop("kind")
                if kind == "facts":
                    member.answers.put(words)
                else:
                    self._heard(key.data, kind, words)

    def close(self) -> None:
        """Let all processes end, and wait for them."""
        self._closing = True
        for member in self.members:
            with contextlib.suppress(OSError):
                member.channel.shutdown(socket.SHUT_RDWR)
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(_LEAVE_S)
        children.kill([member.process for member in self.members])
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()
        for member in self.members:
            member.channel.close()
        self.members = []
