"""The HTTP server of a peer: one route for gossip, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from shoal.core.extras import import_extra
from shoal.fields.retrieve.grank.entries import EntryRefusedError
from shoal.fields.retrieve.grank.protocols import RetrieveError

MESSAGE_BYTES = 4 * 2**20
"""Most bytes of a message."""

Answer = Callable[[Any, int], dict[str, Any] | None]
"""(message, its bytes) -> the answer; None while the peer is offline."""

_DESCRIPTORS, _START_S = 256, 30.0


@contextlib.contextmanager
def gossip_server(answer: Answer, host: str, port: int) -> Iterator[str]:
    """Answer ``POST /v1/gossip`` as long as the block takes; the address ``host:port``.

    Args:
        answer: called in another thread.
        host: address to listen on.
        port: 0 for a free one.

    Raises:
        RetrieveError: the address cannot be had.
    """
    uvicorn: Any = import_extra("uvicorn", extra="run", purpose="the server of a peer")
    from shoal.serve.http.accept import BoundedServer
    from shoal.serve.http.limits import HttpLimits

    try:
        listener = socket.create_server((host, port), backlog=64)
    except OSError as cause:
        raise RetrieveError(f"peer: cannot listen on {host}:{port} ({cause.strerror})") from cause
    config = uvicorn.Config(
        _app(answer), lifespan="off", log_config=None, access_log=False, server_header=False
    )
    server = BoundedServer(config, limits=HttpLimits(), descriptors=_DESCRIPTORS)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), name="peer", daemon=True
    )
    thread.start()
    try:
        where = listener.getsockname()
        yield f"{where[0]}:{where[1]}"
    finally:
        server.should_exit = True
        thread.join(_START_S)
        listener.close()


def _app(answer: Answer) -> Any:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def gossip(request: Request) -> Response:
        pieces, size = [], 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > MESSAGE_BYTES:
                    return JSONResponse({"error": f"more than {MESSAGE_BYTES} bytes"}, 413)
                pieces.append(piece)
            message = json.loads(b"".join(pieces))
            result = await run_in_threadpool(answer, message, size)
        except ClientDisconnect:
            return Response(status_code=499)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "the body is no JSON"}, 400)
        except EntryRefusedError as cause:
            return JSONResponse({"error": str(cause)}, 422)
        return Response(status_code=503) if result is None else JSONResponse(result)

    return Starlette(routes=[Route("/v1/gossip", gossip, methods=["POST"])])
