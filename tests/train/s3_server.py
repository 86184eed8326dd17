"""A server of S3 for the time of a test: moto's, skipped where that is not installed."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class Refusing:
    """Refuses all uploads of one step."""

    step = "step-00000040"

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and self.step in environ["PATH_INFO"]:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("500 Internal Server Error", [("Content-Type", "text/xml")])
            return [b"<Error><Code>InternalError</Code><Message>no</Message></Error>"]
        return self.app(environ, start)


@contextlib.contextmanager
def bucket(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any] = lambda app: app
) -> Iterator[str]:
    """An address in a bucket of its own; ``wrap`` puts something before the server."""
    clients = pytest.importorskip("s3fs").S3FileSystem
    moto = pytest.importorskip("moto.server")
    from werkzeug.serving import make_server

    server = wrap(moto.DomainDispatcherApplication(moto.create_backend_app))
    listening = make_server("127.0.0.1", 0, server, threaded=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    clients.clear_instance_cache()
    try:
        import fsspec

        # The server's buckets are those of all tests of this process.
        name = f"b{uuid.uuid4().hex}"
        fsspec.filesystem("s3").mkdir(name)
        yield f"s3://{name}/run"
    finally:
        clients.clear_instance_cache()
        listening.shutdown()
        listening.server_close()
