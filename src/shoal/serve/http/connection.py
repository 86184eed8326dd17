"""Connections that cannot be held for nothing: uvicorn's HTTP/1.1 with time limits.

A client has some seconds to send its request and, once answers pile up, some seconds to
read them; then its connection is cut, which ends the request that hangs on it. Requests that
another program may read differently are refused, see :mod:`shoal.serve.http.strict`.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.serve.http.errors import ApiError, error_response
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.strict import StrictBuffer

if TYPE_CHECKING:
    from asyncio import Transport


class HttpConnection(H11Protocol):
    """One connection; the class made by :func:`connection` has the limits."""

    limits: HttpLimits

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn._receive_buffer = StrictBuffer()
        self.on_lost: Callable[[], None] = lambda: None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    @property
    def waiting_since(self) -> float | None:
        """Since when a request is waited for, on the loop's clock; None while one is answered."""
        return self._since if self._incomplete else None

    @property
    def _incomplete(self) -> bool:
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Take in bytes of a request."""
        super().data_received(data)
        self._expect_request()

    def shutdown(self) -> None:
        """End, with the answer that is under way; a request that is not whole gets none."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.abort()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """The next request is waited for."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the one shape of errors."""
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or (
            answering and cycle.response_started
        ):
            self.transport.abort()  # in the middle of another answer nothing can be said
            return
        if answering:  # the head was valid and the body is not: its answer is this one
            cycle.disconnected = True
            cycle.message_event.set()
        cause = sys.exception()
        status = cause.error_status_hint if isinstance(cause, h11.RemoteProtocolError) else 400
        if status == 431:
            text = f"headers: expected at most {self.limits.header_bytes} B"
            error = ApiError(text, status=431, code="headers_too_large")
        else:
            error = ApiError("the request is not valid HTTP", code="invalid_http")
        answer = error_response(error)
        named = [(b"x-request-id", secrets.token_hex(16).encode()), (b"connection", b"close")]
        head = h11.Response(status_code=error.status, headers=[*answer.raw_headers, *named])
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_request(self) -> None:
        """Watch the clock while a request is incomplete."""
        if self._incomplete and self._reading is None:
            self._since = self.loop.time()
            self._reading = self.loop.call_later(self.limits.read_s, self._give_up)
        elif not self._incomplete and self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up(self) -> None:
        self._reading = None
        self.transport.abort()


def connection(limits: HttpLimits) -> type[HttpConnection]:
    """The class of connections with these limits, as uvicorn wants it."""
    return type("LimitedConnection", (HttpConnection,), {"limits": limits})
