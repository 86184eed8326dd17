"""Requests that two programs may read differently are refused by every program that listens."""

from __future__ import annotations

import contextlib
import socket

import pytest
from listening import KINDS, listening

pytestmark = pytest.mark.multi

CHUNKED = b"POST %P HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n" + (
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
REFUSED = {
    "a line that goes on": b"GET %H HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n c\r\n\r\n",
    "a line that goes on, tab": b"GET %H HTTP/1.1\r\nHost: localhost\r\nX-A: b\r\n\tc\r\n\r\n",
    "a first line that goes on": b"GET %H HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "bare line feeds": b"GET %H HTTP/1.1\nHost: localhost\n\n",
    "one bare line feed": b"GET %H HTTP/1.1\r\nHost: localhost\nX-A: b\r\n\r\n",
    "a bare line feed at the end": b"GET %H HTTP/1.1\r\nHost: localhost\r\n\n",
    "a bare line feed before the end": b"GET %H HTTP/1.1\r\nHost: localhost\nX",
    "a bare carriage return": b"GET %H HTTP/1.1\r\nHost: localhost\r\nX-A: b\rc\r\n\r\n",
    "a space before the colon": b"GET %H HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a length and chunks": b"POST %P HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST %P HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Content-Length: 5\r\n\r\n{}  ",
    "a length of 2^64 and 2": b"POST %P HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 184467440737095516180\r\n\r\n{}",
}
REFUSED_CHUNKS = {
    "2^64": b"10000000000000000\r\n{}\r\n0\r\n\r\n",
    "2^64 + 2": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "2^63": b"8000000000000000\r\n{}\r\n0\r\n\r\n",
    "all ones": b"FFFFFFFFFFFFFFFFF\r\n{}\r\n0\r\n\r\n",
    "many digits": b"0" * 40 + b"2\r\n{}\r\n0\r\n\r\n",
    "a sign": b"-2\r\n{}\r\n0\r\n\r\n",
    "a prefix": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a bare line feed": b"2\n{}\r\n0\r\n\r\n",
    "a bare line feed and no more": b"2\n{}",
    "a bare line feed in an extension": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "more than its size": b"2\r\n{}{}\r\n0\r\n\r\n",
    "a trailer that goes on": b"2\r\n{}\r\n0\r\nX-A: b\r\n c\r\n\r\n",
    "a bare line feed in the trailer": b"2\r\n{}\r\n0\r\nX-A: b\n\r\n",
}
GOOD = b"GET %H HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module", params=KINDS)
def it(request, byte_model, tmp_path_factory):
    with listening(request.param, byte_model, tmp_path_factory.mktemp("listening")) as result:
        yield result


def answer(it, data, *, pieces=1):
    """All that comes back of raw bytes, sent in so many pieces."""
    data = data.replace(b"%H", it.health.encode()).replace(b"%P", it.posted.encode())
    data = data.replace(b"localhost", b"localhost:%d" % it.port)
    size = max(1, -(-len(data) // pieces))
    result = b""
    with socket.create_connection(("127.0.0.1", it.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Refused before all was sent, it cannot be sent; what was answered is there to be read.
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(data), size):
                connection.sendall(data[begin : begin + size])
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                result += piece
    return result


def refused(it, data, *statuses):
    for pieces in (1, 7):
        got = answer(it, data, pieces=pieces)
        assert got[9:12] in (b"400", *statuses), (pieces, got[:200])
        assert got.count(b"HTTP/1.1") == 1 and b"connection: close" in got.lower()
    assert answer(it, GOOD).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("what", REFUSED)
def test_heads(it, what):
    refused(it, REFUSED[what])


@pytest.mark.parametrize("what", REFUSED_CHUNKS)
def test_chunks(it, what):
    # The dashboard takes no chunks at all, and may say so before it has met the wrong one.
    others = (b"413",) if it.kind == "dashboard" else ()
    refused(it, CHUNKED + REFUSED_CHUNKS[what], *others)


def test_what_is_allowed_passes(it):
    """Line ends, white space and chunks as they may be, whole or byte by byte."""
    head = (
        b"GET %H HTTP/1.1\r\nHost: localhost\r\nX-A: b c\t d \r\nX-B:\r\nConnection: close\r\n\r\n"
    )
    for pieces in (1, 9, 1000):
        assert answer(it, head, pieces=pieces).startswith(b"HTTP/1.1 200 ")
    if it.kind == "dashboard":
        return
    body = b'{"model":"bytes","prompt":"ab","max_tokens":2}'
    half = len(body) // 2
    chunks = b"".join(
        b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:])
    )
    data = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    for pieces in (1, 9, 1000):
        got = answer(it, data + chunks + b"000\r\nX-A: b\r\n\r\n", pieces=pieces)
        assert got.startswith(b"HTTP/1.1 200 "), got
