"""Queries of communities over HTTP, and a page that draws them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError, require
from shoal.core.parts import table
from shoal.fields.graph.communities.inputs import seeds_of
from shoal.fields.graph.communities.picture import network
from shoal.fields.graph.communities.protocols import CommunityError
from shoal.fields.graph.communities.signature_graph import (
    Community,
    CommunityView,
    SignatureGraph,
)
from shoal.fields.http_app import app_maker
from shoal.fields.rates import timed_call
from shoal.serve.http.app_server import AppOptions, running_app

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from shoal.serve.http.app_server import AppMaker

_SEEDS, _SIZE = 100, 1000

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Communities</title>
<meta name="viewport" content="width=device-width">
<style>body{{font-family:system-ui,sans-serif;margin:2em auto;max-width:46em;padding:0 1em}}
input{{max-width:100%}}svg{{max-width:100%;height:auto}}
@media(prefers-color-scheme:dark){{body{{background:#111;color:#eee}}}}</style>
<form><label>Seeds, with commas <input name="seeds" size="40" value="{seeds}"></label>
<label>Size <input name="size" type="number" min="2" max="{most}" value="{size}"></label>
<label>Method <select name="method">{methods}</select></label> <button>Expand</button></form>
{result}</html>"""


@contextlib.contextmanager
def community_server(graph: SignatureGraph, options: AppOptions | None = None) -> Iterator[str]:
    """Serve :func:`community_app` in a thread, as long as the block takes; its address.

    Args:
        graph: that is asked; it must not change meanwhile.
        options: where to listen; a free port of this machine if not given.

    Raises:
        ShoalError: it does not start.
    """
    where = options or AppOptions(port=0)
    with running_app(community_app(graph, where), where) as url:
        yield url


def community_app(graph: SignatureGraph, options: AppOptions) -> AppMaker:
    """Queries over HTTP, and a page.

    ``GET /v1/communities?seeds=A,B&size=50&method=pagerank`` returns JSON: ``seeds``, ``added``,
    ``scores``, ``groups`` of all members, ``candidates``, and ``seconds`` that it took. ``GET /``
    is a page with a form and a picture.

    Args:
        graph: that is asked; it must not change meanwhile.
        options: where it will listen.
    """
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse, JSONResponse

    async def near(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(_json, graph, request.query_params))

    async def drawn(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(page, graph, request.query_params))

    handlers = {"GET /v1/communities": near, "GET /": drawn}
    return app_maker("Shoal communities", handlers, options)


def answer(graph: SignatureGraph, query: Mapping[str, str]) -> tuple[Community, CommunityView]:
    """The community that the parameters of a request ask for, and its view.

    Args:
        graph: that is asked.
        query: ``seeds``, with commas; ``size``, 50 if not given; ``method``.

    Raises:
        ConfigError: a parameter that is none, or an answer that there is not.
    """
    seeds = seeds_of(query.get("seeds", ""))
    require(
        0 < len(seeds) <= _SEEDS, "seeds", len(seeds), expected=f"1 to {_SEEDS} vertices",
        error=CommunityError,
    )  # fmt: skip
    size = query.get("size", "50")
    require(
        size.isdecimal() and len(size) < 6 and int(size) <= _SIZE, "size", size,
        expected=f"a number up to {_SIZE}", error=CommunityError,
    )  # fmt: skip
    community = graph.expand(seeds, int(size), query.get("method", "mean_similarity"))
    return community, graph.view(community.members)


def page(graph: SignatureGraph, query: Mapping[str, str]) -> str:
    """The page of a query: a form, and a picture if seeds are given."""
    result = ""
    if query.get("seeds"):
        try:
            took, (community, view) = timed_call(lambda: answer(graph, query))
            result = (
                f"<p>{len(community.members):,} members, of {community.candidates:,} candidates, "
                f"in {1000 * took:.1f} ms</p>{network(view, len(community.seeds))}"
            )
        except ShoalError as cause:
            result = f"<p>{escape(str(cause))}</p>"
    chosen = query.get("method", "")
    methods = "".join(
        f"<option{' selected' if name == chosen else ''}>{name}</option>"
        for name in table("community_expander")
    )
    return _PAGE.format(
        seeds=escape(query.get("seeds", "")), size=escape(query.get("size", "50")), most=_SIZE,
        methods=methods, result=result,
    )  # fmt: skip


def _json(graph: SignatureGraph, query: Mapping[str, str]) -> dict[str, Any]:
    took, (community, view) = timed_call(lambda: answer(graph, query))
    return {
        "seeds": community.seeds.tolist(),
        "added": community.added.tolist(),
        "scores": community.scores.tolist(),
        "groups": view.groups.tolist(),
        "candidates": community.candidates,
        "seconds": took,
    }
