"""An aggregator behind uvicorn, as web services of Python are: a baseline of the claim about LIFL.

It differs from the node of the plane ``broker`` in its receiver alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

import uvicorn

from shoal.fields.federate.planes.broker import Broker
from shoal.fields.federate.planes.node import Node
from shoal.fields.federate.planes.process import serve
from shoal.fields.federate.wire.receive import RequestHead, RequestRefusedError

_Message = MutableMapping[str, Any]


class HttpAggregator(Broker):
    """One such aggregator."""

    node: ClassVar = __name__

    def __init__(self) -> None:
        super().__init__(relays=False, tree=False)


class UvicornNode(Node):
    """A node whose requests come through uvicorn with httptools."""

    async def listen(self, listener: socket.socket) -> None:
        """Take requests at a socket that is bound."""
        config = uvicorn.Config(self, lifespan="off", http="httptools", log_config=None)
        server = uvicorn.Server(config)
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)

    async def __call__(
        self,
        scope: _Message,
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        """One request of ASGI."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        size = int(headers.get("content-length", 0))
        head = RequestHead(method=scope["method"], path=scope["path"], headers=headers, size=size)
        status = 200
        try:
            upload, at = self.accept(head), 0
            while at < size:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                piece = message["body"]
                upload.room[at : at + len(piece)] = piece
                at += len(piece)
            said = await upload.finish()
            body = bytes(said) if isinstance(said, memoryview) else json.dumps(said).encode()
        except RequestRefusedError as cause:
            status, body = cause.status, json.dumps({"error": str(cause)}).encode()
        await send({"type": "http.response.start", "status": status,
                    "headers": [(b"content-length", b"%d" % len(body))]})  # fmt: skip
        await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    serve(UvicornNode)
