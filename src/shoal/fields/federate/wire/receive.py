"""HTTP/1.1 requests whose bodies go from the kernel straight to where they are wanted.

The head is parsed by h11 and held against what proxies read differently; the body, whose length
must be stated, is received into memory that the handler names. There is one request at a time on a
connection, which is kept for the next one.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import h11

from shoal.serve.http.strict import StrictBuffer

UPDATE_PATH = re.compile(r"/v1/clients/([A-Za-z0-9._-]{1,64})/updates/(\d{1,18})")
"""Of the updates of clients: name and number."""

_HEAD_BYTES = 16 << 10
_CONNECTIONS = 4096
# Seconds without a byte of a request that has begun, and those that it may take in all.
_SILENT_S, _WHOLE_S = 30.0, 900.0


Answer = Mapping[str, Any] | memoryview
"""Of a request that is taken."""


class RequestRefusedError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        text: what is wrong.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """A request whose body has not come yet.

    Args:
        method: such as POST.
        path: with its query.
        headers: in small letters.
        size: bytes of the body.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    size: int


class Upload(Protocol):
    """A request that is accepted."""

    room: memoryview
    """Where the body goes; exactly as long."""

    async def finish(self) -> Answer:
        """The body is there.

        Returns:
            The answer: JSON, or bytes as they are.

        Raises:
            RequestRefusedError: it is not taken.
        """

    def abort(self) -> None:
        """The connection was lost before the body was whole."""


class Accepts(Protocol):
    """What a server does with requests."""

    def accept(self, head: RequestHead) -> Upload:
        """Name the place of the body.

        Raises:
            RequestRefusedError: there is none.
        """


class Receiver(asyncio.BufferedProtocol):
    """One connection.

    Args:
        handler: accepts requests.
        most: bytes of a body that is read though it is refused, so that its sender hears why.
        others: connections that are open; this one is among them.
    """

    def __init__(self, handler: Accepts, most: int, others: set[Receiver]) -> None:
        self._handler, self._most, self._others = handler, most, others
        self._head = bytearray(_HEAD_BYTES)
        self._have = self._left = 0
        self._upload: Upload | None = None
        self._room = memoryview(b"")
        self._refused: RequestRefusedError | None = None
        self._busy = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._heard = 0.0

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        if len(self._others) >= _CONNECTIONS:
            self._transport.abort()
            return
        self._others.add(self)
        self._begun = self._heard = self._loop.time()
        self._watch()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        if not self._left:
            return memoryview(self._head)[self._have :]
        if self._refused is not None:
            return self._room[: min(len(self._room), self._left)]
        return self._room[len(self._room) - self._left :]

    def buffer_updated(self, nbytes: int) -> None:
        """They have come."""
        self._heard = self._loop.time()
        if self._left:
            self._left -= nbytes
            if not self._left:
                self._complete()
            return
        if not self._have:
            self._begun = self._heard
        self._have += nbytes
        if not self._busy:
            self._look()

    def eof_received(self) -> bool:
        """The client has closed; nothing is half open."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """What was begun is given up."""
        self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._left and self._upload is not None:
            self._upload.abort()
        self._upload = None

    # Requests

    def _look(self) -> None:
        """Begin the request whose head is whole, if there is one."""
        end = self._head.find(b"\r\n\r\n", 0, self._have)
        if end < 0:
            if self._have == _HEAD_BYTES:
                self._answer(431, {"error": f"headers: at most {_HEAD_BYTES} B"}, close=True)
            return
        text = bytes(self._head[: end + 4])
        rest = bytes(self._head[end + 4 : self._have])
        self._have = 0
        self._busy = True
        try:
            head = parse_head(text)
        except RequestRefusedError as cause:
            self._answer(cause.status, {"error": str(cause)}, close=True)
            return
        self._refused = None
        try:
            self._upload = self._handler.accept(head)
            self._room = self._upload.room
        except RequestRefusedError as cause:
            if head.size > self._most:
                self._answer(cause.status, {"error": str(cause)}, close=True)
                return
            self._refused, self._upload = cause, None
            self._room = memoryview(bytearray(min(head.size, 1 << 18)))
        self._left = head.size
        if len(rest) > head.size:  # the next request must wait for this one's answer
            self._head[: len(rest) - head.size] = rest[head.size :]
            self._have = len(rest) - head.size
            rest = rest[: head.size]
        if rest:
            if self._refused is None:
                self._room[: len(rest)] = rest
            self._left -= len(rest)
        if not self._left:
            self._complete()

    def _complete(self) -> None:
        upload, self._upload = self._upload, None
        self._room = memoryview(b"")
        if self._refused is not None or upload is None:
            refused = self._refused or RequestRefusedError(500, "no handler")
            self._answer(refused.status, {"error": str(refused)})
            return
        self._transport.pause_reading()
        self._task = self._loop.create_task(self._finish(upload))

    async def _finish(self, upload: Upload) -> None:
        try:
            said: Answer = await upload.finish()
        except RequestRefusedError as cause:
            self._answer(cause.status, {"error": str(cause)})
        else:
            self._answer(200, said)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _answer(self, status: int, said: Answer, *, close: bool = False) -> None:
        if isinstance(said, memoryview):
            body, kind = said, "application/octet-stream"
        else:
            body, kind = memoryview(json.dumps(said).encode()), "application/json"
        again = "retry-after: 1\r\n" if status == 503 else ""
        keep = "close" if close else "keep-alive"
        self._transport.write(
            f"HTTP/1.1 {status} -\r\ncontent-type: {kind}\r\n{again}"
            f"content-length: {len(body)}\r\nconnection: {keep}\r\n\r\n".encode()
        )
        self._transport.write(body)
        self._busy = False
        self._begun = self._loop.time()
        if close:
            self._transport.close()
        elif self._have:
            self._look()

    def _watch(self) -> None:
        """Cut a connection on which a request has begun and does not go on."""
        now = self._loop.time()
        under_way = bool(self._left or (self._have and not self._busy))
        if under_way and (now - self._heard > _SILENT_S or now - self._begun > _WHOLE_S):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(_SILENT_S / 2, self._watch)


def parse_head(text: bytes) -> RequestHead:
    """The head of a request with a stated length.

    Raises:
        RequestRefusedError: it is not valid, or has no length.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
    connection._receive_buffer = StrictBuffer()
    try:
        connection.receive_data(text)
        event = connection.next_event()
    except (h11.ProtocolError, ValueError) as cause:
        raise RequestRefusedError(400, f"the request is not valid HTTP: {cause}") from cause
    if not isinstance(event, h11.Request):
        raise RequestRefusedError(400, "the request is not valid HTTP")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
    size = headers.get("content-length", "0" if event.method == b"GET" else "")
    if "transfer-encoding" in headers or not size.isdecimal():
        raise RequestRefusedError(411, "content-length: state the bytes of the body")
    return RequestHead(
        method=event.method.decode(),
        path=event.target.decode("latin-1"),
        headers=headers,
        size=int(size),
    )


async def listen(
    handler: Accepts, sock: Any, *, most: int, tls: ssl.SSLContext | None
) -> asyncio.Server:
    """Serve requests on a socket that is bound.

    Args:
        handler: accepts requests.
        sock: the socket.
        most: bytes of the largest body.
        tls: certificate; None for plain HTTP.
    """
    open_ones: set[Receiver] = set()
    return await asyncio.get_running_loop().create_server(
        lambda: Receiver(handler, most, open_ones), sock=sock, ssl=tls, backlog=1024
    )
