"""The dashboard as a FastAPI application: an address, what it reads, the page it fills."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic_core import from_json
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.app.dash import charts, views
from shoal.app.dash.compare import compare
from shoal.app.dash.explore import explore
from shoal.app.dash.goodput import GoodputSearches, show
from shoal.app.dash.guard import CHAT, HEALTH, MAX_BODY, DashboardAccess, DashboardGuard
from shoal.app.dash.plots import plots, window
from shoal.app.dash.timeline import timeline
from shoal.app.dash.workers import inspect
from shoal.claims.catalogue import catalogue
from shoal.claims.gallery.pages import render_index, render_row
from shoal.core.errors import ConfigError, ServeError, ShoalError, StoreError
from shoal.core.web import NavigationLink, WebSite
from shoal.serve.watch.moments import Watch
from shoal.serve.watch.upstream import AnswerDelta, Upstream
from shoal.train.runs import Runs, RunStatus, file_type, open_inside

NAV = (
    NavigationLink("Overview", "/"),
    NavigationLink("Machine", "/machine"),
    NavigationLink("Runs", "/runs"),
    NavigationLink("Plans", "/plans"),
    NavigationLink("Explore", "/explore"),
    NavigationLink("Goodput", "/goodput"),
    NavigationLink("Score", "/score"),
    NavigationLink("Server", "/server"),
    NavigationLink("Claims", "/claims"),
)
PAGE = 25
MAX_FILE = 256 * 2**20
_NO_SERVER = "no server is configured; start the dashboard with --server URL"
# A report is a page of its own: it has its style inside, and nothing else is let in.
_REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """What a dashboard shows, and to whom.

    Args:
        runs: directories whose sub-directories are runs, besides the registered ones.
        plans: plan files to show besides those of runs.
        results: directory of the results of claims.
        score: path of the score; the one in Shoal's home if None.
        server: a running ``shoal serve``; None for no server.
        access: secrets and names.
    """

    runs: tuple[Path, ...] = ()
    plans: tuple[Path, ...] = ()
    results: Path = Path("results")
    score: Path | None = None
    server: Upstream | None = None
    access: DashboardAccess = field(default_factory=DashboardAccess)


def create_app(settings: DashboardSettings) -> FastAPI:
    """The application, with its guard around it."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        # The first page would pay for imports, templates, the catalogue and the probes.
        await run_in_threadpool(overview)
        yield

    app = FastAPI(
        title="shoal dash", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    site = WebSite(
        "shoal.app.dash",
        "shoal.claims.gallery",
        "shoal.plan",
        assets="/assets/",
        nav=NAV,
        home="/",
        filters=views.FILTERS,
    )
    runs = Runs(settings.runs, settings.score)
    watch = None if settings.server is None else Watch(settings.server)
    searches = GoodputSearches()
    get = functools.partial(app.api_route, methods=["GET", "HEAD"], include_in_schema=False)

    def page(template: str, here: str = "", code: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(site.render(template, here=here, **values), code)

    def wanted(identity: str) -> RunStatus:
        position = runs.find(identity)
        if position is None:
            raise HTTPException(404, "unknown run; it may have been deleted")
        return position

    @get(HEALTH)
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @get("/assets/{name}")
    def asset(name: str) -> Response:
        try:
            content = site.asset(name)
        except ConfigError as cause:
            raise HTTPException(404, "unknown file") from cause
        kept = {"cache-control": "private, max-age=300"}
        return Response(content, media_type=site.media_type(name), headers=kept)

    @get("/")
    def overview() -> HTMLResponse:
        return page("overview.html", "/", **views.overview(settings, runs))

    @get("/machine")
    def machine() -> HTMLResponse:
        return page("machine.html", "/machine", **views.machine())

    @get("/machine/curves")
    def machine_curves() -> JSONResponse:
        loaded = views.machine()["machine"]
        chart = None if loaded is None else charts.of_machine(loaded)
        return JSONResponse(plots([] if chart is None else [chart]))

    @get("/runs")
    def list_runs(request: Request) -> HTMLResponse:
        words = request.query_params.get("q", "").strip()[:100]
        number = request.query_params.get("page", "1")
        results = [run for run in runs.all() if views.matches(run, words)]
        pager = views.Pager.of(len(results), number, PAGE, "/runs", {"q": words})
        shown = runs.detailed(results[pager.first : pager.last])
        return page("runs.html", "/runs", runs=shown, pager=pager, q=words)

    @get("/runs/{identity}")
    def one_run(identity: str) -> HTMLResponse:
        result = wanted(identity)
        return page("run.html", "/runs", **views.run(runs, result))

    @get("/runs/{identity}/live")
    def live(identity: str) -> HTMLResponse:
        result = wanted(identity)
        answer = page("run_live.html", **views.run(runs, result))
        answer.headers["x-run-state"] = result.state
        return answer

    @get("/runs/{identity}/curves")
    def run_curves(identity: str, request: Request) -> JSONResponse:
        entry = wanted(identity).entry
        plan = views.PageSection.of(lambda: runs.plan(entry)).value
        query = request.query_params
        return JSONResponse(plots(charts.of_run(runs.events(entry), plan, window(query))))

    @get("/runs/{identity}/timeline")
    def run_timeline(identity: str, request: Request) -> HTMLResponse:
        result = wanted(identity)
        outcome = timeline(result, runs.events(result.entry), request.query_params)
        return page("timeline.html", "/runs", **outcome)

    @get("/runs/{identity}/{name}")
    def file(identity: str, name: str) -> Response:
        result = wanted(identity)
        opened = None
        kind = file_type(name)
        if kind is not None and result.entry.path is not None:
            opened = open_inside(result.entry.path, name)
        if opened is None:
            raise HTTPException(404, "the directory of the run has no such file")
        with opened:
            content = opened.read(MAX_FILE)
        headers = {"content-security-policy": _REPORT_POLICY}
        return Response(content, media_type=kind, headers=headers)

    def both(request: Request) -> list[RunStatus]:
        given = [request.query_params.get(key, "") for key in "ab"]
        return [wanted(identity) for identity in given if identity]

    @get("/compare")
    def comparison(request: Request) -> HTMLResponse:
        return page("compare.html", "/runs", **compare(runs, both(request)))

    @get("/compare/live")
    def compare_live(request: Request) -> HTMLResponse:
        result = compare(runs, both(request))
        answer = page("compare_live.html", **result)
        answer.headers["x-run-state"] = result["state"]
        return answer

    @get("/compare/curves")
    def compare_curves(request: Request) -> JSONResponse:
        named = [
            (f"{letter}: {one.entry.name}", runs.events(one.entry))
            for letter, one in zip("AB", both(request), strict=False)
        ]
        return JSONResponse(plots(charts.of_runs(named, window(request.query_params))))

    @get("/plans")
    def plans(request: Request) -> HTMLResponse:
        everything = runs.all()
        number = request.query_params.get("page", "1")
        pager = views.Pager.of(len(everything), number, PAGE, "/plans", {})
        shown = views.plans(runs, everything[pager.first : pager.last])
        files = views.plan_files(settings.plans)
        return page("plans.html", "/plans", plans=shown, files=files, pager=pager)

    @get("/explore")
    def explorer(request: Request) -> HTMLResponse:
        return page("explore.html", "/explore", **explore(request.query_params))

    @get("/goodput")
    def goodput(request: Request) -> HTMLResponse:
        result = show(request.query_params, searches, watch, begin=True)
        return page("goodput.html", "/goodput", **result)

    @get("/goodput/live")
    def goodput_live(request: Request) -> HTMLResponse:
        result = show(request.query_params, searches, watch, begin=False)
        answer = page("goodput_live.html", **result)
        answer.headers["x-run-state"] = result["state"]
        return answer

    @get("/goodput/curves")
    def goodput_curves(request: Request) -> JSONResponse:
        chart = show(request.query_params, searches, watch, begin=False)["chart"]
        return JSONResponse(plots([] if chart is None else [chart]))

    @get("/plans/file/{index}")
    def plan_file(index: str) -> HTMLResponse:
        files = views.plan_files(settings.plans)
        row = {str(place): one for place, one in enumerate(files)}.get(index)
        if row is None:
            raise HTTPException(404, "unknown plan file; start the dashboard with --plan FILE")
        if row.plan is None:
            raise ConfigError(row.error)
        return page("plan.html", "/plans", **views.plan(row.plan), run=None)

    @get("/plans/{identity}")
    def one_plan(identity: str) -> HTMLResponse:
        result = wanted(identity)
        plan = runs.plan(result.entry)
        if plan is None:
            raise HTTPException(404, "this run has no plan")
        return page("plan.html", "/plans", **views.plan(plan), run=result)

    @get("/score")
    def score(request: Request, quantity: str = "") -> HTMLResponse:
        number = request.query_params.get("page", "1")
        return page("score.html", "/score", **views.score(runs, quantity, number, PAGE))

    @get("/score/curves")
    def score_curves() -> JSONResponse:
        return JSONResponse(plots(views.score_charts(runs)))

    @get("/claims")
    def claims() -> HTMLResponse:
        papers = views.papers(settings.results)
        return HTMLResponse(render_index(papers, pages=site, places=views.PLACES))

    @get("/claims/results/{name}")
    def result(name: str) -> Response:
        known = {f"{row.claim}.json" for row in catalogue() if row.claim is not None}
        opened = open_inside(settings.results, name) if name in known else None
        if opened is None:
            raise HTTPException(404, "unknown results file")
        with opened:
            content = opened.read(MAX_FILE)
        return Response(content, media_type="application/json")

    @get("/claims/{kind}/{value}")
    def claims_of(kind: str, value: str) -> HTMLResponse:
        everything = views.papers(settings.results)
        result = views.group(everything, kind, value)
        if result is None:
            raise HTTPException(404, "unknown group of papers")
        return HTMLResponse(
            render_index(
                result[0], every=everything, group=result[1], pages=site, places=views.PLACES
            )
        )

    @get("/claims/{number}")
    def claim(number: str) -> HTMLResponse:
        for paper in views.papers(settings.results):
            if str(paper.row.id) == number:
                page = render_row(paper, pages=site, places=views.PLACES, here="/claims")
                return HTMLResponse(page)
        raise HTTPException(404, "unknown paper")

    def talking(chat: dict[str, Any] | None) -> HTMLResponse:
        upstream = settings.server
        models = () if upstream is None else upstream.state().models
        fields = {} if watch is None else views.server(watch)
        return page("server.html", "/server", server=upstream, models=models, chat=chat, **fields)

    @get("/server")
    def server() -> HTMLResponse:
        return talking(None)

    @get("/server/live")
    def server_live() -> HTMLResponse:
        if watch is None:
            raise HTTPException(404, _NO_SERVER)
        answer = page("server_live.html", server=settings.server, **views.server(watch))
        answer.headers["x-run-state"] = "running"  # a server that is gone may come back
        return answer

    @get("/server/curves")
    def server_curves() -> JSONResponse:
        if watch is None:
            raise HTTPException(404, _NO_SERVER)
        return JSONResponse(plots(charts.of_server(watch.look()[1])))

    def inspected(template: str) -> HTMLResponse:
        if settings.server is None:
            raise HTTPException(404, _NO_SERVER)
        return page(template, "/server", **inspect(settings.server))

    @get("/server/workers")
    def workers() -> HTMLResponse:
        return inspected("workers.html")

    @get("/server/workers/live")
    def workers_live() -> HTMLResponse:
        answer = inspected("workers_live.html")
        answer.headers["x-run-state"] = "running"
        return answer

    @app.post(CHAT, include_in_schema=False)
    async def chat(request: Request) -> Response:
        upstream = settings.server
        if upstream is None:
            raise HTTPException(404, _NO_SERVER)
        body = await _body(request)
        if request.headers.get("content-type", "").startswith("application/json"):
            model, messages = _conversation(body)
            pieces = _lines(upstream, model, messages)
            return _Streamed(pieces)
        # Without JavaScript a form is sent, and the whole answer is a page.
        form = parse_qs(body.decode("utf-8", errors="replace"), keep_blank_values=True)
        said = form.get("message", [""])[0]
        model, messages = _conversation(
            json.dumps(
                {
                    "model": form.get("model", [""])[0],
                    "messages": [{"role": "user", "content": said}],
                }
            ).encode()
        )

        def answered() -> HTMLResponse:
            pieces: list[AnswerDelta] = []
            error = ""
            try:
                for piece in upstream.stream(model, messages):
                    pieces.append(piece)  # what came before an error is shown
            except ServeError as cause:
                error = str(cause)
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            return talking({"message": said, "answer": text, "tokens": tokens, "error": error})

        return await run_in_threadpool(answered)

    @app.exception_handler(HTTPException)
    def refused(_request: Request, error: HTTPException) -> HTMLResponse:
        fields = {404: "Not found", 400: "Not understood", 413: "Too large"}
        title = fields.get(error.status_code, "Refused")
        return page("error.html", code=error.status_code, title=title, message=error.detail)

    @app.exception_handler(ShoalError)
    def unusable(_request: Request, error: ShoalError) -> HTMLResponse:
        newer = isinstance(error, StoreError)
        title = "The score cannot be read" if newer else "This page cannot be shown"
        return page("error.html", code=503 if newer else 422, title=title, message=str(error))

    app.add_middleware(DashboardGuard, access=settings.access)
    return app


class _Streamed(StreamingResponse):
    """JSON lines that end when the client disconnects."""

    def __init__(self, pieces: Generator[str, None, None]) -> None:
        super().__init__(iterate_in_threadpool(pieces), media_type="application/x-ndjson")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pieces.close()  # and with it the connection, so the server stops writing


async def _body(request: Request) -> bytes:
    """The body, which the guard has made sure says its length."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a request has at most {MAX_BODY} bytes")
    return body


def _conversation(body: bytes) -> tuple[str, list[dict[str, str]]]:
    """Model and messages of a request.

    Raises:
        HTTPException: it is something else.
    """
    try:
        raw = from_json(body)  # which, unlike json, refuses halves of characters
        model = raw["model"]
        messages = [
            {"role": message["role"], "content": message["content"]} for message in raw["messages"]
        ]
    except (ValueError, KeyError, TypeError) as cause:
        raise HTTPException(400, "expected a model and a list of messages, in JSON") from cause
    good = isinstance(model, str) and 0 < len(messages) <= 64
    for message in messages:
        good = good and message["role"] in ("user", "assistant")
        good = good and isinstance(message["content"], str) and bool(message["content"].strip())
    if not good:
        raise HTTPException(
            400, "expected 1 to 64 messages, each of user or assistant and with a text"
        )
    return model, messages


def _lines(
    upstream: Upstream, model: str, messages: list[dict[str, str]]
) -> Generator[str, None, None]:
    """The answer as JSON lines: pieces of text, then that it is done, or what went wrong."""
    try:
        for piece in upstream.stream(model, messages):
            yield json.dumps(dataclasses.asdict(piece)) + "\n"
        yield json.dumps({"done": True}) + "\n"
    except ServeError as cause:
        yield json.dumps({"error": str(cause)}) + "\n"
