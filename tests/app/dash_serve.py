"""As much of ``shoal serve`` as the dashboard asks."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Serve(BaseHTTPRequestHandler):
    """As much of ``shoal serve`` as the dashboard asks."""

    asked: list[dict[str, object]] = []
    keys: set[str] = set()
    gone = threading.Event()

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _say(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.keys.add(self.headers.get("authorization", ""))
        if self.path == "/health":
            self._say(200, '{"status": "ok"}')
        elif self.path == "/v1/models":
            self._say(200, '{"data": [{"id": "tiny", "max_model_len": 400}]}')
        elif self.path == "/metrics":
            self._say(
                200,
                '# HELP x\nshoal:num_requests_running{model_name="tiny"} 2.0\n'
                'shoal:generation_tokens_total{model_name="tiny"} 1234.0\n'
                'shoal:time_to_first_token_seconds_sum{model_name="tiny"} 3.0\n'
                'shoal:time_to_first_token_seconds_count{model_name="tiny"} 30.0\n',
                "text/plain",
            )
        else:
            self._say(404, '{"error": {"message": "nothing here"}}')

    def do_POST(self) -> None:
        raw = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(raw)
        text = raw["messages"][-1]["content"]
        if "refuse" in text:
            self._say(429, '{"error": {"message": "too many requests"}}')
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        pieces = ("You said: ", text, " <b>&")
        if "endless" in text:
            pieces = ("on and on ",) * 10_000
            self.gone.clear()
        for piece in pieces:
            event = {"choices": [{"delta": {"content": piece}}]}
            try:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            except OSError:
                self.gone.set()
                return
            if len(pieces) > 3:
                time.sleep(0.01)
        if "break" not in text:
            self.wfile.write(b"data: [DONE]\n\n")


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """Such a server, in a thread; its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Serve)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
