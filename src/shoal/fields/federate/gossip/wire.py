"""Messages between nodes over TCP: a length, then a safetensors file with a few words.

Every connection begins with ``hello``, which has the sender's number and the key of the run.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.fields.federate.protocols import FederationError, UpdateRefusedError
from shoal.fields.federate.wire.messages import HEADER_BYTES, pack, unpack

_LENGTH = struct.Struct(">Q")
# Seconds in which the other end must take a message.
_SEND_S = 30.0


class NodeLine:
    """One end of a connection; used by one thread at a time.

    Args:
        connection: that is open.
        most: bytes of the tensors of a message that are read; more is refused.

    Attributes:
        sent: bytes that were sent.
    """

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._socket, self._most = connection, most + HEADER_BYTES
        self.sent = 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, port: int, most: int, me: int, key: str, timeout: float) -> NodeLine:
        """Connect to a node of this machine, and say who it is.

        Raises:
            OSError: it cannot be reached.
        """
        line = cls(socket.create_connection(("127.0.0.1", port), timeout), most)
        line.send("hello", {"from": me, "key": key})
        return line

    def send(
        self, kind: str, words: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        body = pack(tensors or {}, {**words, "kind": kind})
        self._socket.settimeout(_SEND_S)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)
        self.sent += len(body) + _LENGTH.size

    def receive(
        self, timeout: float | None = None
    ) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
        """The next message: its kind, its words, its tensors.

        Args:
            timeout: seconds; None to wait for ever.

        Raises:
            OSError: the other end is gone, or silent.
            UpdateRefusedError: the message is too long, or none.
        """
        self._socket.settimeout(timeout)
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > self._most:
            raise UpdateRefusedError(f"message: {size} bytes; at most {self._most} are expected")
        tensors, words = unpack(self._exactly(size))
        return str(words.pop("kind", "")), words, tensors

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("the other end is gone")
            at += count
        return bytes(data)

    def close(self) -> None:
        """Close the connection; a thread that waits on it learns that it is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> NodeLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checked(kind: str, wanted: str) -> None:
    """Whether a message is of a kind.

    Raises:
        FederationError: it is not.
    """
    if kind != wanted:
        raise FederationError(f"message {kind!r}; {wanted!r} is expected")
