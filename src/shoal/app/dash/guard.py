"""Who may see the dashboard: allowed methods, Host, Origin and a token, before any route.

A page on another site can make this browser send requests here, by a link, a form, a
script or a name that resolves to 127.0.0.1. Each of these is refused by one of the
checks below, and a process of another user lacks the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH = "/healthz"
CHAT = "/server/chat"
# The only address that takes a POST.
_METHODS: Mapping[str, frozenset[str]] = {CHAT: frozenset({"POST"})}
_READ = frozenset({"GET", "HEAD"})
# The longest body of a request.
MAX_BODY = 256 * 1024

_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # Not no-referrer: with that a form's own Origin would be null.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


def host_names(host: str) -> frozenset[str]:
    """Names under which a dashboard that listens on ``host`` may be asked for.

    Never any name at all: a foreign name may resolve to this machine.
    """
    names = {"localhost", "127.0.0.1", "::1", host.lower()}
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        import psutil

        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        for addresses in psutil.net_if_addrs().values():
            names |= {
                address.address.partition("%")[0].lower()
                for address in addresses
                if address.family in (socket.AF_INET, socket.AF_INET6)
            }
    return frozenset(names)


@dataclass(frozen=True)
class DashboardAccess:
    """Secrets and names of one dashboard.

    Args:
        hosts: names and addresses that a Host header may have, without the port.
        token: part of the start address.
        cookie: what a browser that came with the token is given.
        name: name of the cookie; another port of this host is another dashboard.
    """

    hosts: frozenset[str] = frozenset({"localhost", "127.0.0.1", "::1"})
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    name: str = "shoal-dash"


class DashboardGuard:
    """Refuses what must not reach a route, and puts its headers on every answer."""

    def __init__(self, app: ASGIApp, access: DashboardAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no page uses a web socket
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer instead of the route's own; None lets the request through."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or _name(host) not in self._access.hosts:
            return _plain(421, "unknown host name; open the address that the dashboard printed")
        origins = headers.getlist("origin")
        # For every verb, and before it is looked at: no verb can be forgotten.
        foreign = any(origin.lower() != f"{scope['scheme']}://{host.lower()}" for origin in origins)
        if foreign:
            return _plain(403, "requests from other sites are not allowed")
        allowed = _METHODS.get(path, _READ)
        if scope["method"] not in allowed:
            result = ", ".join(sorted(allowed))
            return _plain(405, f"this address accepts {result} only", {"allow": result})
        if scope["method"] == "POST" and len(origins) != 1:
            return _plain(403, "requests from other sites are not allowed")
        if scope["method"] == "POST" and not _length(headers) <= MAX_BODY:
            # What follows on this connection is a body that is not read.
            text = f"a request needs a Content-Length of at most {MAX_BODY} bytes"
            return _plain(413, text, {"connection": "close"})
        if path == HEALTH:
            return None
        return self._identify(scope, headers)

    def _identify(self, scope: Scope, headers: Headers) -> Response | None:
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "token"]
        if given and scope["method"] in _READ:
            if not _same(given[0], self._access.token):
                return _plain(401, "the token in this address is not the token of this dashboard")
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            return self._welcome("/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else ""))
        cookies = cookie_parser(headers.get("cookie", ""))
        if not _same(cookies.get(self._access.name, ""), self._access.cookie):
            return _plain(401, "open the address that `shoal dash` printed; it contains the token")
        return None

    def _welcome(self, target: str) -> Response:
        """Give the cookie, and go on to the page without the token in its address.

        A redirect would not do: a browser that was sent here from elsewhere keeps a strict
        cookie back while it follows.
        """
        there = escape(target, quote=True)
        answer = HTMLResponse(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Shoal</title>'
            f'<link rel="icon" href="/assets/favicon.svg">'
            f'<meta http-equiv="refresh" content="0; url={there}"></head>'
            f'<body><p><a href="{there}">Open the dashboard</a></p></body></html>'
        )
        answer.set_cookie(
            self._access.name, self._access.cookie, httponly=True, samesite="strict", path="/"
        )
        return answer


def _plain(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    reason = HTTPStatus(status).phrase
    return PlainTextResponse(f"{status} {reason}: {text}\n", status, headers)


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _length(headers: Headers) -> float:
    """Bytes that the body is said to have; infinite when it does not say."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else float("inf")


def _name(host: str) -> str:
    """Name or address of a Host header; empty when it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return ""
    plain = parts.netloc == host and "@" not in host and not parts.path and not parts.query
    return (parts.hostname or "").lower() if plain and not parts.fragment else ""
