"""What stands before every route: hosts, origins, the key, sizes, and the last resort.

It is the outermost layer of the application, so that nothing behind it is reached without
the key, and no error leaves in another shape.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.core.errors import ServeError, require
from shoal.serve.http.draining import DrainState
from shoal.serve.http.errors import ApiError, as_api_error, error_response
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.unknown import WARNING

log = logging.getLogger("shoal.serve")

# The only route that answers without a key: load balancers and containers ask it.
OPEN = frozenset({"/health"})

# A monitor of a server that ends may go on.
_WHILE_DRAINING = frozenset({"/metrics"})

# What is counted for a client that left before there was an answer.
_LEFT = 499

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class AccessControl:
    """Who may call.

    Args:
        key: what ``Authorization: Bearer`` must have; None lets all users of this machine in.
        hosts: names besides those of this machine that ``Host`` may have; ``*`` for any.
        origins: web pages that may call, such as ``http://localhost:3000``.
        keys: further keys; which one a request had is its ``state["api_key"]``.
        key_header: a header that may have the key in the place of ``Authorization``.
    """

    key: str | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)
    key_header: str = ""

    @property
    def every_key(self) -> tuple[str, ...]:
        """All keys; none let all users of this machine in."""
        return self.keys if self.key is None else (self.key, *self.keys)

    def __post_init__(self) -> None:
        for key in self.every_key:
            require(
                key.isascii() and key.isprintable() and " " not in key and len(key) >= 8,
                "the API key",
                "***",
                expected="at least 8 printable ASCII characters without spaces",
                hint="make one with: openssl rand -hex 16",
                error=ServeError,
            )
        for origin in self.origins:
            parts = urlsplit(origin)
            require(
                parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.path,
                "allowed origin",
                origin,
                expected="scheme and host such as http://localhost:3000",
                error=ServeError,
            )


class HttpGuard:
    """The outermost layer.

    Args:
        access: who may call.
        limits: sizes of headers.
        count: called with (path, status) of every request.
        drain: closed while the server drains.
        methods: that web pages may use.
        respond: the answer that is an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessControl,
        limits: HttpLimits,
        count: Callable[[str, int], None],
        drain: DrainState,
        methods: Sequence[str] = ("GET", "POST"),
        respond: Callable[[ApiError], Response] = error_response,
    ) -> None:
        self._app = app
        self._methods, self._respond = methods, respond
        self._drain = drain
        self._limits = limits
        self._count = count
        self._origins = frozenset(access.origins)
        self._hosts = _LOCAL_NAMES | {host.lower() for host in access.hosts}
        # Compared as digests: equal lengths, so that the time reveals nothing about the key.
        self._digests = {_digest(key.encode()): key for key in access.every_key}
        self._key_header = access.key_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        origin = headers.get("origin")

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
                if "warning" in state:
                    MutableHeaders(scope=message)[WARNING] = state["warning"]
                if origin in self._origins:
                    out = MutableHeaders(scope=message)
                    out["access-control-allow-origin"] = origin
                    out["vary"] = "Origin"
            await send(message)

        # The client may name the request, so that both logs have the same name.
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state["request_id"] = name
        try:
            await self._guarded(scope, headers, receive, watched)
        except ServeError as cause:
            await self._answer(as_api_error(cause), status, scope, receive, watched)
        except Exception:
            log.exception("%s %s failed (request %s)", scope["method"], scope["path"], name)
            error = ApiError(
                "internal error on this request; see its log",
                status=500,
                code="server_error",
            )
            await self._answer(error, status, scope, receive, watched)
        finally:
            log.debug("%s %s %d (request %s)", scope["method"], scope["path"], status, name)
            self._count(scope["path"], status or _LEFT)

    async def _answer(
        self, error: ApiError, status: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if status:
            raise error  # an answer has begun; the connection is cut, so it is not taken for whole
        await self._respond(error)(scope, receive, send)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        self._check_size(scope)
        self._check_host(headers.getlist("host"))
        if self._check_origin(headers) and scope["method"] == "OPTIONS":
            await self._preflight(send)
            return
        if scope["path"] not in OPEN:
            scope["state"]["api_key"] = self._check_key(headers)
        if self._drain.closed and scope["path"] not in _WHILE_DRAINING:
            raise ApiError(
                "the server is stopping and accepts no more requests",
                status=503,
                code="draining",
                retry_after_s=1,
            )
        self._drain.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.inside -= 1

    def _check_size(self, scope: Scope) -> None:
        fields: Sequence[tuple[bytes, bytes]] = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in fields)
        if size > self._limits.header_bytes or len(fields) > self._limits.headers:
            raise ApiError(
                f"headers of {len(fields)} fields and {size} B: expected at most "
                f"{self._limits.headers} fields and {self._limits.header_bytes} B",
                status=431,
                code="headers_too_large",
            )

    def _check_host(self, given: list[str]) -> None:
        name = _host_name(given[0]) if len(given) == 1 else None
        if "*" not in self._hosts and name not in self._hosts:
            raise ApiError(
                f"Host = {', '.join(given)[:80]!r}: expected a name of this server; "
                "allow more with --allow-host",
                status=403,
                code="host_not_allowed",
            )

    def _check_origin(self, headers: Headers) -> bool:
        """Whether the request comes from a web page that may call."""
        origin = headers.get("origin")
        if origin is None:
            return False
        parts = urlsplit(origin)
        own = parts.scheme in ("http", "https") and parts.netloc == headers.get("host")
        if not own and origin not in self._origins:
            raise ApiError(
                f"Origin = {origin[:80]!r}: web pages of other sites may not call this server; "
                "allow one with --allow-origin",
                status=403,
                code="origin_not_allowed",
            )
        return True

    def _check_key(self, headers: Headers) -> str | None:
        """The key of a request; None where none is needed."""
        if not self._digests:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        own = headers.get(self._key_header) if self._key_header else None
        if own is not None:
            scheme, key = "bearer", own
        given = _digest(key.strip().encode("latin-1", "replace"))
        # All are compared, so that the time does not say which was right.
        same = [self._digests[one] for one in self._digests if hmac.compare_digest(given, one)]
        if not same or scheme.lower() != "bearer":
            raise ApiError(
                "wrong or missing API key: expected the header Authorization: Bearer KEY with the "
                "server's key",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return same[0]

    async def _preflight(self, send: Callable[[Message], Awaitable[None]]) -> None:
        """Inform a browser what an allowed page may send."""
        names = ["Authorization", "Content-Type", *filter(None, [self._key_header])]
        headers = [
            (b"access-control-allow-methods", ", ".join(self._methods).encode()),
            (b"access-control-allow-headers", ", ".join(names).encode()),
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _host_name(host: str) -> str | None:
    """The name in a ``Host`` header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
