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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le, Len
from starlette.responses import JSONResponse

from shoal.core.config import Value, parse
from shoal.fields.http_app import app_maker
from shoal.fields.retrieve.recommend.ranker import HSTURanker
from shoal.serve.http.app_server import AppOptions, running_app
from shoal.serve.http.body import read_body

if TYPE_CHECKING:
    from starlette.requests import Request

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
    alone = asyncio.Lock()  # a ranker serves one at a time

    async def events(request: Request) -> JSONResponse:
        body = parse(EventBody, await read_body(request, where.limits), where="body")
        async with alone:
            await asyncio.to_thread(ranker.observe, body.user, body.item, body.action, body.time)
        return JSONResponse({"status": "ok"})

    async def recommend(request: Request) -> JSONResponse:
        body = parse(RecommendBody, await read_body(request, where.limits), where="body")
        async with alone:
            found = await asyncio.to_thread(
                ranker.rank, body.user, body.k, body.candidates, time=body.time
            )
        return JSONResponse({"user": body.user, "items": [one._asdict() for one in found]})

    handlers = {"POST /v1/events": events, "POST /v1/recommend": recommend}
    with running_app(app_maker("Shoal recommend", handlers, where), where) as url:
        yield url
