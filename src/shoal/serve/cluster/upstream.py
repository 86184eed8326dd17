"""Requests to other servers: HTTP/1.1 over a Unix socket, TCP or TLS, one connection each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import h11

from shoal.core.errors import ServeError

_READ_BYTES = 2**16
_HEADERS = 2**16
_CONNECT_S = 30.0
# s of silence until the other machine is asked for a sign, between questions, questions without
# an answer; and ms until what was sent must have arrived.
_ALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 30_000,
}


class ServerLostError(ServeError):
    """A server is not there, or was gone before its answer had ended.

    Args:
        message: what happened.
        sent: it had the request.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Tcp:
    """Where a server listens, for other machines too.

    Args:
        tls: whether it speaks TLS, with a certificate that is checked.
    """

    host: str
    port: int
    tls: bool = False


async def _connect(server: str | Tcp) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(_CONNECT_S):
        if not isinstance(server, Tcp):
            return await asyncio.open_unix_connection(server)
        reader, writer = await asyncio.open_connection(
            server.host, server.port, ssl=server.tls or None
        )
    # An answer may be silent for long; a machine that is gone must not be. The kernel asks it.
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return reader, writer


@dataclass(frozen=True)
class UpstreamResponse:
    """An answer whose head is there and whose body is still to come.

    Args:
        headers: names in lower case.
        pieces: bytes of the body as they come; ServerLostError if they break off.
    """

    status: int
    headers: Mapping[str, str]
    pieces: AsyncGenerator[bytes, None]

    async def body(self) -> bytes:
        """All of it; ServerLostError if it breaks off."""
        return b"".join([piece async for piece in self.pieces])


class _Exchange:
    """One request and its answer on a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADERS)

    async def send(self, head: h11.Request, body: bytes) -> None:
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._state.send(event) or b"")
        await self._writer.drain()

    async def next(self) -> Any:
        while (event := self._state.next_event()) is h11.NEED_DATA:
            self._state.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        with _as_lost():
            while isinstance(event := await self.next(), h11.Data):
                yield bytes(event.data)


@contextlib.contextmanager
def _as_lost(*, sent: bool = True) -> Any:
    try:
        yield
    except (OSError, h11.RemoteProtocolError) as cause:
        raise ServerLostError(f"the connection to the server broke: {cause}", sent=sent) from cause


@contextlib.asynccontextmanager
async def ask(
    server: str | Tcp,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> AsyncGenerator[UpstreamResponse, None]:
    """Ask a server; leaving the block closes the connection, which ends what was asked.

    Args:
        server: path of its Unix socket, or where else it is.
        method: of HTTP.
        target: path and query.
        headers: besides those of every request.
        body: JSON, or nothing.

    Raises:
        ServerLostError: it is not there, or went away before the head of its answer.
    """
    host = f"{server.host}:{server.port}" if isinstance(server, Tcp) else "localhost"
    common = {"Host": host, "Connection": "close", "Content-Length": str(len(body))}
    head = h11.Request(
        method=method, target=target, headers=list({**common, **(headers or {})}.items())
    )
    with _as_lost(sent=False):
        reader, writer = await _connect(server)
    try:
        exchange = _Exchange(reader, writer)
        with _as_lost():
            await exchange.send(head, body)
            while isinstance(event := await exchange.next(), h11.InformationalResponse):
                pass
            if not isinstance(event, h11.Response):
                raise ServerLostError("the server closed the connection before it answered")
        fields = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        async with contextlib.aclosing(exchange.pieces()) as pieces:
            yield UpstreamResponse(event.status_code, fields, pieces)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
