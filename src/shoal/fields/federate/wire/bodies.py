"""Bodies of requests: read into memory of their size, and sent from where they lie."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shoal.fields.federate.protocols import FederationError, UpdateRefusedError

if TYPE_CHECKING:
    from starlette.requests import Request

_STREAM_S = 120.0


async def read_body(request: Request, most: int) -> memoryview:
    """The body of a request, whose length must be stated; more is not read to its end.

    Raises:
        UpdateRefusedError: it is longer than ``most``, or does not say how long it is.
    """
    stated = request.headers.get("content-length", "")
    if not stated.isdecimal():
        raise UpdateRefusedError("update: state the bytes of its body in content-length")
    size, at = int(stated), 0
    if size > most:
        raise UpdateRefusedError(f"update: more than {most} bytes", reason="oversized")
    body = bytearray(size)
    async for piece in request.stream():
        body[at : at + len(piece)] = piece
        at += len(piece)
    return memoryview(body)


def own_tls(certfile: str) -> ssl.SSLContext:
    """Trust in one certificate, whatever name it bears: that of this federation."""
    context = ssl.create_default_context(cafile=certfile)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def forward(
    url: str, body: memoryview, authorization: str, certfile: str = ""
) -> tuple[int, bytes]:
    """Send a body from where it lies; status and text of the answer.

    Raises:
        OSError: it cannot be sent.
        FederationError: the answer is not HTTP.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=_STREAM_S, context=own_tls(certfile)
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_STREAM_S)
    with contextlib.closing(connection):
        headers = {"Authorization": authorization, "Content-Length": str(len(body))}
        try:
            connection.request("POST", parts.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(1 << 16)
        except http.client.HTTPException as cause:
            raise FederationError(f"{url}: {cause!r}") from cause


def post(url: str, body: memoryview, token: str, certfile: str = "") -> None:
    """Send a body to another process of this federation.

    Raises:
        OSError: it cannot be sent.
        FederationError: the answer is not 200.
    """
    status, text = forward(url, body, f"Bearer {token}", certfile)
    if status != 200:
        raise FederationError(f"{url}: {status} {text[:300]!r}")
