"""A small HTTP server in a thread of this process, for what a field of Shoal answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.extras import import_extra

_DESCRIPTORS, _START_S = 256, 30.0


@contextlib.contextmanager
def http_server(
    app: Any, host: str, port: int, *, name: str, error: type[ShoalError]
) -> Iterator[str]:
    """Answer by an app as long as the block takes; the address ``host:port``.

    Args:
        app: of Starlette; called in another thread.
        host: address to listen on.
        port: 0 for a free one.
        name: of the thread, and of the server in errors.
        error: raised if the address cannot be had.
    """
    uvicorn: Any = import_extra("uvicorn", extra="run", purpose=f"the server of a {name}")
    from shoal.serve.http.accept import BoundedServer
    from shoal.serve.http.limits import HttpLimits

    try:
        listener = socket.create_server((host, port), backlog=64)
    except OSError as cause:
        raise error(f"{name}: cannot listen on {host}:{port} ({cause.strerror})") from cause
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False
    )
    server = BoundedServer(config, limits=HttpLimits(), descriptors=_DESCRIPTORS)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), name=name, daemon=True
    )
    thread.start()
    try:
        where = listener.getsockname()
        yield f"{where[0]}:{where[1]}"
    finally:
        server.should_exit = True
        thread.join(_START_S)
        listener.close()
