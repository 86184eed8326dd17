"""How one talks to a snapshot process: framed messages after an authenticated hello.

A message is a JSON header and, behind it, bytes. The connecting side proves, and is shown, that
both know the secret of the run: the other's random number, signed. The secret never travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any, Self

from shoal.core.config import Value
from shoal.core.errors import CheckpointError, RankError

ENVIRONMENT = "SHOAL_MEMORY"
"""Variable that names the file of :class:`Members`."""
SECRET = "SHOAL_MEMORY_SECRET"  # noqa: S105 - the name of a variable
"""Variable with the secret of the run."""

_LENGTHS = struct.Struct("<IQ")
_MOST_HEADER = 64 * 2**20
_MOST_HELLO = 4096
_CONNECT_S = 10.0
# s without a byte from one member or room at the other, after which an exchange fails: both are
# in it, so neither has anything else to do.
_SILENT_S = 120.0
# Bytes to wait for before the next of them are taken.
_AT_ONCE = 2**20


class SnapshotAddress(Value):
    """Where the snapshot process of a rank listens."""

    host: str
    port: int
    pid: int


class Members(Value):
    """The snapshot processes of a run, as a file lists them for the trainers.

    Args:
        run: a name that no other run has.
        generation: counts the starts of the trainers; rings of different ones do not mix.
        restore: the step that all processes hold and the trainers go on from, if there is one.
        places: by rank.
    """

    run: str
    generation: int = 0
    restore: int | None = None
    places: tuple[SnapshotAddress, ...] = ()


def send(connection: socket.socket, header: Mapping[str, Any], payload: Any = b"") -> None:
    """Send one message.

    Raises:
        OSError: the other is gone.
    """
    text = json.dumps(header).encode()
    view = memoryview(payload).cast("B")
    connection.sendall(_LENGTHS.pack(len(text), len(view)) + text)
    if len(view):
        connection.sendall(view)


def receive(
    connection: socket.socket, *, into: Any = None, most: int = _MOST_HEADER
) -> tuple[dict[str, Any], bytearray]:
    """Take one message; its bytes go ``into`` a buffer of their length if one is given.

    Raises:
        OSError: the other is gone.
        CheckpointError: what comes is no message.
    """
    lengths, size = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if lengths > most or (most < _MOST_HEADER and size):
        raise CheckpointError(f"a message with a header of {lengths} bytes: not one of ours")
    header = json.loads(_exactly(connection, lengths))
    payload = bytearray()
    if size:
        if into is None:
            payload = bytearray(size)
            into = payload
        view = memoryview(into).cast("B")
        if len(view) != size:
            raise CheckpointError(f"{size} bytes came where {len(view)} were asked for")
        _fill(connection, view)
    return header, payload


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection has ended")
        view = view[count:]


def _sign(secret: bytes, *words: str) -> str:
    return hmac.new(secret, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def welcome(connection: socket.socket, secret: bytes, run: str) -> None:
    """The hello of the listening side.

    Raises:
        CheckpointError: the other is of another run, or does not know the secret.
        OSError: the other is gone.
    """
    connection.settimeout(_CONNECT_S)
    nonce = secrets.token_hex(16)
    send(connection, {"nonce": nonce, "run": run})
    header, _ = receive(connection, most=_MOST_HELLO)
    theirs, proof = str(header.get("nonce")), str(header.get("proof"))
    if not hmac.compare_digest(proof, _sign(secret, "client", run, nonce, theirs)):
        refuse(connection, "the handshake does not prove the secret of this run")
        raise CheckpointError("a connection without the secret of the run was rejected")
    send(connection, {"proof": _sign(secret, "server", run, theirs, nonce)})
    connection.settimeout(None)


def refuse(connection: socket.socket, reason: str) -> None:
    """Send the reason to the peer, if it still listens."""
    with contextlib.suppress(OSError):
        send(connection, {"error": reason})


def exchange_bytes(
    after: socket.socket, before: socket.socket, out: memoryview, into: memoryview
) -> None:
    """Send to one while receiving from the other: no member waits for a buffer to be emptied.

    Raises:
        OSError: one of them is gone, or blocks.
    """
    # Woken once for much and not for every packet: it is the trainers' processor.
    before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(len(into), _AT_ONCE)))
    while len(out) or len(into):
        readable, writable, _ = select.select(
            [before] if len(into) else [], [after] if len(out) else [], [], _SILENT_S
        )
        if not readable and not writable:
            raise TimeoutError(f"a member of the group did not respond within {_SILENT_S:g} s")
        if writable:
            # As much as there is room for: one that waits for more room does not receive.
            with contextlib.suppress(BlockingIOError):
                out = out[after.send(out, socket.MSG_DONTWAIT) :]
        if readable:
            count = before.recv_into(into)
            if not count:
                raise ConnectionResetError("a member of the group has ended")
            into = into[count:]
            if 0 < len(into) < _AT_ONCE:
                before.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(into))


class SnapshotClient:
    """A connection to a snapshot process.

    Args:
        place: where it listens.
        run: the run that it must belong to.
        secret: of the run.
        rank: whose process it is, for errors.

    Raises:
        RankError: no process answers there.
        CheckpointError: it belongs to another run.
    """

    def __init__(self, place: SnapshotAddress, run: str, secret: bytes, *, rank: int) -> None:
        self.place = place
        self.rank = rank
        self._name = f"snapshot process of rank {rank} ({place.host}:{place.port})"
        try:
            self.connection = socket.create_connection((place.host, place.port), _CONNECT_S)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            header, _ = receive(self.connection, most=_MOST_HELLO)
            value = header.get("run")
            if value != run:
                self.connection.close()
                raise CheckpointError(
                    f"{self._name}: it belongs to run {value!r} and this is {run!r}; what an "
                    "earlier run has left is not taken over"
                )
            nonce, theirs = secrets.token_hex(16), str(header.get("nonce"))
            send(
                self.connection,
                {"nonce": nonce, "proof": _sign(secret, "client", run, theirs, nonce)},
            )
            header, _ = receive(self.connection, most=_MOST_HELLO)
        except OSError as cause:
            raise RankError(f"{self._name} does not answer: {cause}") from cause
        if not hmac.compare_digest(
            str(header.get("proof")), _sign(secret, "server", run, nonce, theirs)
        ):
            self.connection.close()
            raise CheckpointError(f"{self._name}: {header.get('error', 'it has another secret')}")
        self.connection.settimeout(None)

    def call(self, op: str, *, into: Any = None, **arguments: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer.

        Args:
            op: what.
            into: buffer for the bytes of the answer.
            arguments: plain data.

        Raises:
            RankError: the process is gone, or another that it needs.
            CheckpointError: it refuses; the message says why.
        """
        try:
            send(self.connection, {"op": op, **arguments})
            header, _ = receive(self.connection, into=into)
        except OSError as cause:
            raise RankError(f"{self._name} is gone: {cause}") from cause
        if "error" in header:
            kind = RankError if "lost" in header else CheckpointError
            raise kind(f"{self._name}: {header['error']}")
        return header

    def close(self) -> None:
        """End the connection, also for a thread that waits for an answer."""
        # Closing alone does not wake it.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
