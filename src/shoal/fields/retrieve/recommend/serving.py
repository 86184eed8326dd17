"""Recommendations over HTTP: events of users come in, ranked items go out.

=======================  ====================================================================
``POST /v1/events``      an event: ``user``, ``item``, ``action``, ``time`` in seconds
``POST /v1/recommend``   ranked items: ``user``, ``k``, ``candidates`` (all if not given), ``time``
``GET /health``          whether requests are taken; needs no key
=======================  ====================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le, Len
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from shoal.core.config import Value, parse
from shoal.core.errors import ShoalError
from shoal.core.version import __version__
from shoal.fields.retrieve.recommend.ranker import HSTURanker
from shoal.serve.http.api import protect
from shoal.serve.http.app_server import AppOptions, running_app
from shoal.serve.http.body import read_body
from shoal.serve.http.concurrency import ConcurrencyLimit
from shoal.serve.http.draining import DrainState
from shoal.serve.http.errors import ApiError, error_response

if TYPE_CHECKING:
    from shoal.serve.http.guard import AccessControl

ROUTES = (("POST", "/v1/events"), ("POST", "/v1/recommend"), ("GET", "/health"))
"""Every endpoint: method and path."""

UserName = Annotated[str, Len(1, 256)]


class EventBody(Value):
    """An event of a user.

    Args:
        user: who.
        item: its number.
        action: what the user did with it.
        time: when, in seconds.
    """

    user: UserName
    item: Annotated[int, Ge(0)]
    action: Annotated[int, Ge(0)]
    time: float = 0.0


class RecommendBody(Value):
    """What is wanted for a user.

    Args:
        user: for whom; one of whom nothing is known gets the most popular items.
        k: items of the answer, at most.
        candidates: numbers of items that are ranked; None for all.
        time: of the request, in seconds; None for that of the user's last event.
    """

    user: UserName
    k: Annotated[int, Ge(1), Le(1000)] = 10
    candidates: Annotated[list[int], Len(1, 100_000)] | None = None
    time: float | None = None


@contextlib.contextmanager
def recommend_server(ranker: HSTURanker, options: AppOptions | None = None) -> Iterator[str]:
    """Serve a ranker in a thread of this process, for as long as the block takes; its address.

    Args:
        ranker: that has learned; nobody else may use it meanwhile.
        options: where to listen; a free port of this machine if not given.

    Raises:
        ShoalError: it does not start.
    """
    where = options or AppOptions(port=0)

    def make(access: AccessControl, drain: DrainState) -> FastAPI:
        return _app(ranker, where, access, drain)

    with running_app(make, where) as url:
        yield url


def _app(
    ranker: HSTURanker, options: AppOptions, access: AccessControl, drain: DrainState
) -> FastAPI:
    app = FastAPI(title="Shoal recommend", version=__version__, docs_url=None, openapi_url=None)
    room, alone = ConcurrencyLimit(options.limits.open_requests), asyncio.Lock()

    async def events(request: Request) -> JSONResponse:
        with room.take(1):
            body = parse(EventBody, await read_body(request, options.limits), where="body")
            async with alone:  # a ranker serves one at a time
                await asyncio.to_thread(
                    ranker.observe, body.user, body.item, body.action, body.time
                )
        return JSONResponse({"status": "ok"})

    async def recommend(request: Request) -> JSONResponse:
        with room.take(1):
            body = parse(RecommendBody, await read_body(request, options.limits), where="body")
            async with alone:
                found = await asyncio.to_thread(
                    ranker.rank, body.user, body.k, body.candidates, time=body.time
                )
        return JSONResponse({"user": body.user, "items": [one._asdict() for one in found]})

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def refused(_: Request, cause: Exception) -> Any:
        return error_response(ApiError(str(cause)))

    async def stop() -> None:
        """The ranker is its owner's."""

    app.state.stop = stop
    handlers: tuple[Callable[..., Any], ...] = (events, recommend, health)
    for (method, path), handler in zip(ROUTES, handlers, strict=True):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(ShoalError, refused)
    protect(
        app, lambda route, status: None, access=access, limits=options.limits, drain=drain,
        routes=ROUTES,
    )  # fmt: skip
    return app
