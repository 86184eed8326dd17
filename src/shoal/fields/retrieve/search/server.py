"""A running server of collections."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.fields.retrieve.search.api import LIMITS, SearchMetrics, create_search_app
from shoal.fields.retrieve.search.keys import KeyRing
from shoal.fields.retrieve.search.library import Library
from shoal.fields.retrieve.search.protocols import TextEmbedder
from shoal.serve.http.app_server import AppOptions, running_app, serve_app
from shoal.serve.http.draining import DrainState
from shoal.serve.http.limits import HttpLimits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from shoal.serve.http.guard import AccessControl

KEY_HEADER = "api-key"
"""Header in which Qdrant's clients send their key."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Where and how collections are served.

    Args:
        directory: of the collections; made where there is none.
        embedder: makes vectors of texts; None refuses texts without vectors.
        keys: what each API key may do; none lets all users of this machine do everything.
        host: address to listen on; anything but this machine itself needs a key.
        port: 0 for any free one.
        hosts: further names that ``Host`` may have.
        limits: what a request may bring.
        grace_s: s that open requests get to end when the server is stopped.
        metrics: where requests are counted.
    """

    directory: Path
    embedder: TextEmbedder | None = None
    keys: KeyRing = field(default_factory=KeyRing)
    host: str = "127.0.0.1"
    port: int = 6333
    hosts: tuple[str, ...] = ()
    limits: HttpLimits = LIMITS
    grace_s: float = 5.0
    metrics: SearchMetrics = field(default_factory=SearchMetrics)

    def server(self) -> AppOptions:
        """The same for what listens."""
        return AppOptions(
            host=self.host, port=self.port, keys=self.keys.keys, key_header=KEY_HEADER,
            hosts=self.hosts, limits=self.limits, grace_s=self.grace_s,
        )  # fmt: skip

    def app(self, access: AccessControl, drain: DrainState) -> FastAPI:
        """The application, behind a guard."""
        return create_search_app(
            Library(self.directory, self.embedder), keys=self.keys, access=access,
            limits=self.limits, drain=drain, metrics=self.metrics,
        )  # fmt: skip


def serve_search(
    options: SearchOptions, *, ready: Callable[[str], None] | None = None
) -> int | None:
    """Serve collections until Ctrl-C, SIGTERM or SIGHUP; the number of the signal.

    Raises:
        ShoalError: the address is taken or not allowed, or a collection cannot be opened.
    """
    return serve_app(options.app, options.server(), ready=ready)


def running_search(options: SearchOptions) -> AbstractContextManager[str]:
    """A server in a thread of this process, for as long as the block takes; its address.

    Raises:
        ShoalError: it does not start.
    """
    return running_app(options.app, options.server())
