"""A process between sender and receiver that takes a whole message and sends it on.

A broker is one through which all messages go; a sidecar is one that stands before a process and
passes on what is for it. Both are the same: ``POST /to/PORT/PATH`` is stored and then sent to
``/PATH`` at that port of this machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from shoal.fields.federate.planes.node import Received
from shoal.fields.federate.planes.process import Process, serve
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.bodies import forward
from shoal.fields.federate.wire.receive import Answer, RequestHead, RequestRefusedError, Upload

_TO = re.compile(r"/to/(\d{1,5})(/[\x21-\x7e]*)")


class Relay(Process):
    """Stores messages and sends them on.

    Args:
        given: ``most`` bytes of a message, and the ``ports`` to which it sends.
        channel: to the server of the federation.
    """

    def __init__(self, given: Mapping[str, Any], channel: socket.socket) -> None:
        super().__init__(channel, given["most"])
        self._ports = frozenset(given["ports"])

    def accept(self, head: RequestHead) -> Upload:
        """A message for a known port.

        Raises:
            RequestRefusedError: it is none.
        """
        way = _TO.fullmatch(head.path)
        if head.method != "POST" or way is None or int(way[1]) not in self._ports:
            raise RequestRefusedError(404, f"{head.method} {head.path[:80]}: nothing is there")
        if head.size > self._most:
            raise RequestRefusedError(422, f"message: more than {self._most} bytes")
        url = f"http://127.0.0.1:{way[1]}{way[2]}"
        given = head.headers.get("authorization", "")
        return Received(head.size, functools.partial(self._pass, url, given))

    async def _pass(self, url: str, given: str, body: memoryview) -> Answer:
        try:
            status, said = await asyncio.to_thread(forward, url, body, given)
        except (OSError, FederationError) as cause:
            raise RequestRefusedError(502, str(cause)) from cause
        answer: Mapping[str, Any] = json.loads(said)
        if status != 200:
            raise RequestRefusedError(status, answer["error"])
        return answer


if __name__ == "__main__":
    serve(Relay)
