"""A server and its workers, processes of this machine, that exchange messages over sockets.

For protocols in rounds, whose server waits for all workers or for some of them. A message is four
bytes of length and a safetensors file with a few words. Every byte that a socket takes or gives is
counted by the server. A worker says a key of its own when it connects.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from shoal.core import children
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError
from shoal.fields.federate.wire.messages import HEADER_BYTES, pack, unpack

Message = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Tensors and words."""

_LENGTH = 4
# Seconds for all workers to connect and for a message to be taken; for a worker to end.
_START_S, _FAREWELL_S = 120.0, 10.0
_READ = 1 << 20


def frame(tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> bytes:
    """A message as it is on the socket."""
    body = pack(tensors, words)
    return len(body).to_bytes(_LENGTH, "big") + body


class _Reader:
    """Bytes of a socket that become messages.

    Args:
        most: bytes of a message; a longer one is refused before it is read.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now.

        Raises:
            UpdateRefusedError: one is too long, or is none.
        """
        self._data += data
        found = []
        while len(self._data) >= _LENGTH:
            size = int.from_bytes(self._data[:_LENGTH], "big")
            if size > self._most:
                raise UpdateRefusedError(f"message: {size} bytes; at most {self._most} are taken")
            if len(self._data) < _LENGTH + size:
                break
            found.append(unpack(bytes(self._data[_LENGTH : _LENGTH + size])))
            del self._data[: _LENGTH + size]
        return found


@dataclass
class StarTraffic:
    """What has passed the sockets of the server.

    Args:
        up: bytes from workers.
        down: bytes to workers.
        messages: in both directions.
    """

    up: int = 0
    down: int = 0
    messages: int = 0


@dataclass
class Star:
    """The server's end; starts its workers on entry and ends them on exit.

    Args:
        module: that a worker's process runs; its ``main`` begins with :func:`connect`.
        settings: what each worker is given, as JSON.
        most: bytes of a message's tensors.

    Attributes:
        traffic: of all workers since they have connected.
    """

    module: str
    settings: Sequence[Mapping[str, Any]]
    most: int
    traffic: StarTraffic = field(default_factory=StarTraffic)

    def __enter__(self) -> Self:
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._inbox: deque[tuple[int, Message]] = deque()
        self._processes: list[subprocess.Popen[Any]] = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets.values():
            one.close()
        self._selector.close()
        end = time.monotonic() + _FAREWELL_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        children.kill(self._processes)
        for process in self._processes:
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()

    def _start(self) -> None:
        keys = [secrets.token_hex(16) for _ in self.settings]
        with socket.create_server(("127.0.0.1", 0), backlog=len(keys)) as listener:
            for number, (key, setting) in enumerate(zip(keys, self.settings, strict=True)):
                process = children.start(
                    self.module,
                    stdin=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=children.environment({"OMP_NUM_THREADS": "1"}),
                )
                self._processes.append(process)
                assert process.stdin is not None
                given = {"port": listener.getsockname()[1], "key": key, "number": number,
                         "most": self.most, "setting": setting}  # fmt: skip
                process.stdin.write(json.dumps(given) + "\n")
                process.stdin.flush()
            self._accept(listener, keys)
        self._readers = {number: _Reader(self.most + HEADER_BYTES) for number in self._sockets}
        for number, one in self._sockets.items():
            one.settimeout(_START_S)
            self._selector.register(one, selectors.EVENT_READ, number)

    def _accept(self, listener: socket.socket, keys: Sequence[str]) -> None:
        """Take connections until all workers are there; one with a wrong key is closed."""
        listener.settimeout(0.2)
        give_up = time.monotonic() + _START_S
        while len(self._sockets) < len(keys):
            dead = next(
                (at for at, one in enumerate(self._processes) if one.poll() is not None), None
            )
            if dead is not None:
                raise FederationError(self._why(dead))
            if time.monotonic() > give_up:
                raise FederationError(
                    f"{len(self._sockets)} of {len(keys)} workers have connected in {_START_S:g} s"
                )
            try:
                one, _ = listener.accept()
            except TimeoutError:
                continue
            one.settimeout(_START_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = _hello(one, keys)
            if number is None or number in self._sockets:
                one.close()
            else:
                self._sockets[number] = one

    def send(self, worker: int, message: bytes) -> None:
        """A message of :func:`frame` to a worker.

        Raises:
            FederationError: it is gone.
        """
        try:
            self._sockets[worker].sendall(message)
        except OSError as cause:
            raise FederationError(self._why(worker)) from cause
        self.traffic.down += len(message)
        self.traffic.messages += 1

    def receive(self, timeout: float) -> tuple[int, Message] | None:
        """The next message and its worker; None if none has come in so many seconds.

        Raises:
            FederationError: a worker is gone, or has sent what is no message.
        """
        end = time.monotonic() + timeout
        while not self._inbox:
            ready = self._selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                return None
            for key, _ in ready:
                self._read(key.data)
        return self._inbox.popleft()

    def _read(self, worker: int) -> None:
        try:
            data = self._sockets[worker].recv(_READ)
        except OSError:
            data = b""
        if not data:
            raise FederationError(self._why(worker))
        self.traffic.up += len(data)
        for message in self._readers[worker].feed(data):
            self.traffic.messages += 1
            self._inbox.append((worker, message))

    def _why(self, worker: int) -> str:
        process = self._processes[worker]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_FAREWELL_S)
        children.kill([process])
        assert process.stderr is not None
        said = process.stderr.read().strip().splitlines()
        return f"worker {worker} has ended: {said[-1] if said else process.returncode}"


def _hello(one: socket.socket, keys: Sequence[str]) -> int | None:
    """The number of the worker that has connected; None if its key is not the one it was given."""
    try:
        said = one.recv(64, socket.MSG_WAITALL).decode("ascii").split()
        number = int(said[0])
        right = hmac.compare_digest(said[1], keys[number]) and number >= 0
    except (OSError, ValueError, IndexError, TypeError):
        return None
    return number if right else None


class Spoke:
    """A worker's end.

    Attributes:
        number: of the worker.
        setting: what it was given.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.number: int = given["number"]
        self.setting: Mapping[str, Any] = given["setting"]
        self._socket = socket.create_connection(("127.0.0.1", given["port"]), _START_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(f"{self.number} {given['key']}".ljust(64).encode("ascii"))
        self._reader = _Reader(given["most"] + HEADER_BYTES)
        self._inbox: deque[Message] = deque()

    def send(self, message: bytes) -> None:
        """A message of :func:`frame` to the server."""
        self._socket.settimeout(_START_S)
        self._socket.sendall(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None if none has come in so many seconds.

        Raises:
            SystemExit: the server has closed the connection: the run is over.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._inbox:
            self._socket.settimeout(None if end is None else max(1e-6, end - time.monotonic()))
            try:
                data = self._socket.recv(_READ)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            if not data:
                sys.exit(0)
            self._inbox += self._reader.feed(data)
        return self._inbox.popleft()


def connect() -> Spoke:
    """The worker's end of this process; what it needs is read from standard input."""
    return Spoke(json.loads(sys.stdin.readline()))
