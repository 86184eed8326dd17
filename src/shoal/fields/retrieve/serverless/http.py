"""Functions over HTTP on this machine: ``POST /NAME`` with a token, JSON in and out."""

from __future__ import annotations

import hmac
import http.client
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoal.fields.retrieve.serverless.protocols import LIMIT_S, FunctionError

BODY_BYTES = 1 << 28
"""Most bytes of a payload or an answer."""

_HEADER, _STALL_S = "X-Function-Token", 60.0

Answer = Callable[[str, str], str]
"""(name, payload) -> answer; FunctionError where the call fails, with the message of the answer."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # a tree of allocators calls at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that has gone gets no answer, and nothing is logged."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FunctionServer:
    """Answers calls of functions in threads of this process.

    Args:
        answer: called with each.
        token: that a caller must have.
        host: address to listen on.

    Raises:
        FunctionError: there is no port.
    """

    def __init__(self, answer: Answer, token: str, host: str) -> None:
        try:
            self._server = _Server((host, 0), _handler(answer, token))
        except OSError as cause:
            raise FunctionError(f"functions: cannot listen on {host}: {cause.strerror}") from cause
        self.address = f"{host}:{self._server.server_address[1]}"
        thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="functions", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(answer: Answer, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _STALL_S

        def do_POST(self) -> None:
            given = self.headers.get(_HEADER, "").encode()
            length = self.headers.get("Content-Length", "")
            if not hmac.compare_digest(given, token.encode()):
                self._send(403, {"error": "no token of these functions"})
            elif not length.isdecimal() or int(length) > BODY_BYTES:
                self._send(413, {"error": f"expected a body of at most {BODY_BYTES} bytes"})
            else:
                try:
                    text = self.rfile.read(int(length)).decode()
                    self._write(200, answer(self.path[1:], text))
                except (FunctionError, UnicodeDecodeError) as cause:
                    self._send(422, {"error": str(cause)})

        def _send(self, status: int, value: dict[str, str]) -> None:
            self.close_connection = True  # the body may not have been read
            self._write(status, json.dumps(value))

        def _write(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Calls are counted, not printed."""

    return Handler


def post(address: str, token: str, name: str, payload: str) -> str:
    """Call a function of a :class:`FunctionServer`; its answer.

    Raises:
        FunctionError: it failed, or cannot be reached.
    """
    connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
    try:
        headers = {_HEADER: token, "Content-Type": "application/json"}
        connection.request("POST", f"/{name}", payload.encode(), headers)
        response = connection.getresponse()
        text = response.read(BODY_BYTES).decode()
        if response.status == 200:
            return text
        raise FunctionError(str(json.loads(text)["error"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as cause:
        raise FunctionError(f"{name}: {address} does not answer ({cause})") from cause
    finally:
        connection.close()
