"""Connections are accepted as long as there is room for them, and then when there is again.

Left to itself, asyncio accepts until the descriptors have run out, and then fails, logs and tries
again once for each place in the queue. Here the number of connections is bounded below the limit
on descriptors. At the bound no more are accepted: they wait in the queue of the kernel. To make
room, connections that have been waiting for a request for longest are cut, so clients that hold
connections open and ask nothing do not block those that ask; a connection that is being answered
is never cut.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import uvicorn

from shoal.core.descriptors import free_descriptors, raise_descriptor_limit
from shoal.serve.http.connection import HttpConnection, connection
from shoal.serve.http.limits import HttpLimits

log = logging.getLogger("shoal.serve")

# Places in the kernel's queue of connections that are not accepted yet.
BACKLOG = 2048
# Descriptors that are left for files, pipes and processes.
_RESERVE = 64
# Connections accepted in one turn of the loop.
_AT_ONCE = 64
# s that a connection has to send its request before it may be cut for another one, and after
# which a server without room looks again.
_GRACE_S = 0.25
# Connections are cut in batches of this share of the bound: finding the oldest looks at all.
_CUT_SHARE = 1 / 32
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedServer(uvicorn.Server):
    """uvicorn's server with a bound on its connections.

    Args:
        config: of uvicorn; its ``http`` and ``backlog`` are set here.
        limits: of connections and requests.
        descriptors: of each connection: 2 where answering it takes another connection.
    """

    def __init__(self, config: uvicorn.Config, *, limits: HttpLimits, descriptors: int = 1) -> None:
        config.http = connection(limits)
        super().__init__(config)
        raise_descriptor_limit()
        self._limits, self._descriptors = limits, descriptors
        self._acceptors: list[_Acceptor] = []
        self.num_open = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen on sockets that are bound."""
        assert sockets is not None
        await super().startup(sockets=[])
        free = free_descriptors()
        room = (free - min(_RESERVE, free // 4)) // self._descriptors
        most = max(1, min(self._limits.connections, room))
        self._acceptors = [_Acceptor(self, one, most) for one in sockets]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end those that are open."""
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    @property
    def handshake_s(self) -> float | None:
        """S that a client has to agree on TLS; None without it."""
        return self._limits.read_s if self.config.ssl is not None else None

    def connections(self) -> list[HttpConnection]:
        """Those that are open."""
        return [one for one in self.server_state.connections if isinstance(one, HttpConnection)]

    def make(self) -> HttpConnection:
        """A connection, for a socket that was accepted."""
        made = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        assert isinstance(made, HttpConnection)
        made.on_lost = self._lost
        return made

    def _lost(self) -> None:
        self.num_open -= 1
        # Its descriptor is closed right after this call.
        loop = asyncio.get_running_loop()
        for acceptor in self._acceptors:
            loop.call_soon(acceptor.resume)


class _Acceptor:
    """Accepts on one socket, begun at once.

    Args:
        server: whose connections are counted and made.
        listener: bound.
        most: connections that may be open.
    """

    def __init__(self, server: BoundedServer, listener: socket.socket, most: int) -> None:
        self._server, self._listener, self._most = server, listener, most
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closed = self._accepting = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self.resume()

    def resume(self) -> None:
        """Accept again."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._closed = True
        self._pause()

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None if self._closed else self._loop.call_later(_GRACE_S, self.resume)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self._server.num_open >= self._most:
                log.warning(
                    "%d connections are open, as many as may be; others wait. More descriptors "
                    "allow more: ulimit -n",
                    self._most,
                )
                self._make_room()
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # it has gone already
                continue
            except OSError as cause:
                if cause.errno not in _NONE_LEFT:
                    raise
                log.warning("a connection cannot be accepted yet: %s", cause.strerror)
                self._make_room()
                return
            self._server.num_open += 1
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                self._server.make,
                accepted,
                ssl=self._server.config.ssl,
                ssl_handshake_timeout=self._server.handshake_s,
            )
        except OSError:  # no TLS was spoken, or the connection has gone
            self._server.num_open -= 1
            accepted.close()
        except BaseException:
            self._server.num_open -= 1
            accepted.close()
            raise

    def _make_room(self) -> None:
        """Cut those that have been waiting for a request for longest, if any may be."""
        self._pause()
        long_ago = self._loop.time() - _GRACE_S
        waiting = [
            (since, id(one), one)
            for one in self._server.connections()
            if (since := one.waiting_since) is not None and since <= long_ago
        ]
        for _, _, one in sorted(waiting)[: max(1, int(self._most * _CUT_SHARE))]:
            one.transport.abort()
