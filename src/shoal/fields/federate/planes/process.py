"""What the processes of planes share: they take HTTP, and exchange messages with the server."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import sys
from abc import ABC, abstractmethod
from typing import Any

from shoal.fields.federate.planes.channels import MESSAGE_BYTES
from shoal.fields.federate.wire.receive import RequestHead, Upload, listen


class Process(ABC):
    """What processes that take HTTP share: a channel to the server of the federation.

    A message of kind ``K`` calls the method ``on_K`` with its words.

    Args:
        channel: to it.
        most: bytes of the largest body.
        tls: of its requests; None for plain HTTP.
    """

    def __init__(
        self, channel: socket.socket, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._channel, self._most, self._tls = channel, most, tls
        self._over = asyncio.Event()
        self.received = 0

    @abstractmethod
    def accept(self, head: RequestHead) -> Upload:
        """Name the place of a body.

        Raises:
            RequestRefusedError: there is none.
        """

    def say(self, kind: str, **words: Any) -> None:
        """Send a message."""
        self._channel.setblocking(True)
        try:
            self._channel.send(json.dumps({"kind": kind, **words}).encode())
        except OSError:
            self._over.set()
        finally:
            self._channel.setblocking(False)

    def _heard(self) -> None:
        while True:
            try:
                data = self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._over.set()
                return
            message = json.loads(data)
            getattr(self, f"on_{message.pop('kind')}")(**message)

    def on_facts(self) -> None:
        """Say what was used."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.say("facts", up_bytes=self.received, cpu_s=usage.ru_utime + usage.ru_stime)

    async def listen(self, listener: socket.socket) -> None:
        """Take requests at a socket that is bound."""
        self._server = await listen(self, listener, most=self._most, tls=self._tls)

    async def run(self, listener: socket.socket) -> None:
        """Work until the channel is closed."""
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._heard)
        await self.listen(listener)
        self.say("ready")
        await self.until_over()

    async def until_over(self) -> None:
        """Return when the channel is closed."""
        await self._over.wait()


def serve(make: Any) -> None:
    """Run a process: ``python -m ... LISTENER CHANNEL``, settings on standard input."""
    listener, channel = (socket.socket(fileno=int(one)) for one in sys.argv[1:3])
    given = json.loads(sys.stdin.readline())

    async def run() -> None:
        await make(given, channel).run(listener)

    asyncio.run(run())
