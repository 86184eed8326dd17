"""The HTTP application: collections of points in the way of Qdrant's API.

=============================================  ===============================================
``GET /``                                      name and version
``GET /health``                                whether requests are taken; needs no key
``GET /metrics``                               numbers for Prometheus
``GET /collections``                           names of the collections
``PUT /collections/{name}``                    make a collection
``GET /collections/{name}``                    its size, distance and number of points
``DELETE /collections/{name}``                 remove it with its points
``GET /collections/{name}/exists``             whether it is there
``PUT /collections/{name}/points``             add or replace points
``POST /collections/{name}/points``            points by their ids
``GET /collections/{name}/points/{id}``        one point
``POST /collections/{name}/points/delete``     remove points by ids or by a filter
``POST /collections/{name}/points/query``      the best points, by vectors, words or both
``POST /collections/{name}/points/search``     the nearest points, older form
``POST /collections/{name}/points/scroll``     points by their ids, page by page
``POST /collections/{name}/points/count``      how many a filter means
``POST /collections/{name}/snapshots``         write everything anew
``GET /collections/{name}/snapshots``          the last snapshot
=============================================  ===============================================
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.responses import Response

from shoal.core.errors import ConfigError, ShoalError
from shoal.core.parts import table
from shoal.core.version import __version__
from shoal.fields.retrieve.collections import ScoredPoint
from shoal.fields.retrieve.search.hybrid import fused
from shoal.fields.retrieve.search.keys import TENANT, KeyRights, KeyRing, tenant_of
from shoal.fields.retrieve.search.library import Library
from shoal.fields.retrieve.search.protocols import SearchError, SearchMethod
from shoal.fields.retrieve.search.served import ServedCollection, ServedPoint
from shoal.fields.retrieve.search.wire import (
    METRICS,
    POINTS,
    CountBody,
    CreateCollection,
    DeleteBody,
    QueryBody,
    RankedBy,
    RetrieveBody,
    ScrollBody,
    SearchBody,
    UpsertBody,
    asked,
    point_id,
    read,
    shown,
)
from shoal.serve.http.api import protect
from shoal.serve.http.body import read_body
from shoal.serve.http.concurrency import ConcurrencyLimit
from shoal.serve.http.draining import DrainState
from shoal.serve.http.errors import ApiError
from shoal.serve.http.guard import AccessControl
from shoal.serve.http.limits import HttpLimits

_ONE = "/collections/{name}"
_HANDLERS = {
    ("GET", "/"): "version",
    ("GET", "/health"): "health",
    ("GET", "/metrics"): "metrics_text",
    ("GET", "/collections"): "collections",
    ("PUT", _ONE): "create",
    ("GET", _ONE): "describe",
    ("DELETE", _ONE): "drop",
    ("GET", f"{_ONE}/exists"): "exists",
    ("PUT", f"{_ONE}/points"): "upsert",
    ("POST", f"{_ONE}/points"): "retrieve",
    ("POST", f"{_ONE}/points/delete"): "delete",
    ("POST", f"{_ONE}/points/query"): "query",
    ("POST", f"{_ONE}/points/search"): "search",
    ("POST", f"{_ONE}/points/scroll"): "scroll",
    ("POST", f"{_ONE}/points/count"): "count",
    ("GET", f"{_ONE}/points/{{id}}"): "point",
    ("POST", f"{_ONE}/snapshots"): "snapshot",
    ("GET", f"{_ONE}/snapshots"): "snapshots",
}
ROUTES: tuple[tuple[str, str], ...] = tuple(_HANDLERS)
"""Every endpoint: method and path."""

LIMITS = HttpLimits(
    body_bytes=32 * 2**20, json_containers=100_000, json_strings=500_000, open_requests=128
)
"""What a request may bring, where nothing else is said: a thousand points of 1,000 numbers."""

_QUERIES = (f"{_ONE}/points/query", f"{_ONE}/points/search")
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
# Points of an answer that is written faster than it is handed to a thread.
_INLINE_POINTS = 100
# Times of queries that are kept for a report.
_KEPT = 100_000

Handler = Callable[[Request, KeyRights], Awaitable[Any]]


class SearchMetrics:
    """What a server counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "shoal:search_requests_total", "HTTP requests.", ("route", "status"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "shoal:search_request_seconds", "Time to answer a request, s.", ("route",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.query_s: deque[float] = deque(maxlen=_KEPT)

    def count(self, route: str, status: int) -> None:
        """A request was answered."""
        self._requests.labels(route, str(status)).inc()

    def took(self, route: str, seconds: float) -> None:
        """A handler has ended."""
        self._seconds.labels(route).observe(seconds)
        if route in _QUERIES:
            self.query_s.append(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


def create_search_app(
    library: Library,
    *,
    keys: KeyRing | None = None,
    access: AccessControl | None = None,
    limits: HttpLimits = LIMITS,
    drain: DrainState | None = None,
    metrics: SearchMetrics | None = None,
) -> FastAPI:
    """The application.

    Args:
        library: its collections; closed when the server stops.
        keys: what each API key may do.
        access: who may call.
        limits: what a request may bring.
        drain: closed while the server drains.
        metrics: where requests are counted.
    """
    metrics = metrics or SearchMetrics()
    service = _SearchService(library, keys or KeyRing(), limits, metrics)
    app = FastAPI(
        title="Shoal search", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    for (method, path), name in _HANDLERS.items():
        endpoint = service.endpoint(path, getattr(service, name))
        app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def stop() -> None:
        await asyncio.to_thread(library.close)

    async def refused(_: Request, cause: Exception) -> Response:
        return error_answer(_as_api_error(cause))

    app.state.stop = stop
    app.add_exception_handler(ShoalError, refused)
    protect(
        app, metrics.count, access=access, limits=limits, drain=drain, routes=ROUTES,
        respond=error_answer,
    )  # fmt: skip
    return app


def _as_api_error(cause: Exception) -> ApiError:
    if isinstance(cause, SearchError):
        return ApiError(str(cause), status=cause.status)
    if isinstance(cause, ConfigError):
        return ApiError(str(cause))
    return ApiError(str(cause), status=500)


def error_answer(error: ApiError) -> Response:
    """An error in Qdrant's form: ``{"status": {"error": ...}, "time": ...}``."""
    return _json({"status": {"error": str(error)}, "time": 0.0}, error.status, error.headers)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Response(text, status, headers, "application/json")


def _is_large(result: Any) -> bool:
    points = result.get("points", ()) if isinstance(result, dict) else result
    return isinstance(points, list) and len(points) > _INLINE_POINTS


class _SearchService:
    """The handlers of the routes; work on points is done in threads."""

    def __init__(
        self, library: Library, keys: KeyRing, limits: HttpLimits, metrics: SearchMetrics
    ) -> None:
        self._library, self._keys, self._limits = library, keys, limits
        self._metrics = metrics
        self._open = ConcurrencyLimit(limits.open_requests)

    def endpoint(self, route: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """A route with its limit, its time, and the one form of answers."""

        async def answer(request: Request) -> Response:
            begin = time.perf_counter()
            with self._open.take(1):
                rights = self._keys.of(getattr(request.state, "api_key", None))
                result = await handler(request, rights)
            seconds = time.perf_counter() - begin
            self._metrics.took(route, seconds)
            if isinstance(result, Response):
                return result
            body = {"result": result, "status": "ok", "time": seconds}
            if _is_large(result):  # so that others are not held up
                return await asyncio.to_thread(_json, body)
            return _json(body)

        return answer

    def _collection(self, request: Request) -> ServedCollection:
        return self._library.get(request.path_params["name"])

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_body(request, self._limits)

    # The server

    async def version(self, _: Request, __: KeyRights) -> Response:
        return _json({"title": "shoal - search", "version": __version__})

    async def health(self, _: Request, __: KeyRights) -> Response:
        """200 while requests are taken."""
        return _json({"status": "ok"})

    async def metrics_text(self, _: Request, rights: KeyRights) -> Response:
        _whole(rights)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # Collections

    async def collections(self, _: Request, __: KeyRights) -> Any:
        return {"collections": [{"name": name} for name in self._library.names()]}

    async def create(self, request: Request, rights: KeyRights) -> Any:
        _whole(rights)
        body = read(CreateCollection, await self._body(request))
        await asyncio.to_thread(
            self._library.create, request.path_params["name"], body.vectors.size,
            metric=METRICS[body.vectors.distance], text=body.text,
        )  # fmt: skip
        return True

    async def describe(self, request: Request, rights: KeyRights) -> Any:
        """What it is, and how many points the tenant has."""
        made = self._collection(request)
        number = await asyncio.to_thread(made.count, _tenant(request, rights))
        distances = {metric: name for name, metric in METRICS.items()}
        vectors = {"size": made.points.dim, "distance": distances[made.points.metric]}
        return {
            "status": "green", "optimizer_status": "ok", "points_count": number,
            "indexed_vectors_count": number, "segments_count": 1, "payload_schema": {},
            "config": {
                "params": {"vectors": vectors},
                # Fields that Qdrant's clients expect, of an index that is not here.
                "hnsw_config": {"m": 0, "ef_construct": 4, "full_scan_threshold": 0},
                "optimizer_config": {"default_segment_number": 1, "flush_interval_sec": 0},
                "metadata": {"text": made.text},
            },
        }  # fmt: skip

    async def exists(self, request: Request, _: KeyRights) -> Any:
        return {"exists": request.path_params["name"] in self._library.names()}

    async def drop(self, request: Request, rights: KeyRights) -> Any:
        _whole(rights)
        return await asyncio.to_thread(self._library.drop, request.path_params["name"])

    async def snapshot(self, request: Request, rights: KeyRights) -> Any:
        _whole(rights)
        made = self._collection(request)
        await asyncio.to_thread(made.snapshot)
        return (await asyncio.to_thread(_snapshots, made))[0]

    async def snapshots(self, request: Request, rights: KeyRights) -> Any:
        _whole(rights)
        return await asyncio.to_thread(_snapshots, self._collection(request))

    # Points

    async def upsert(self, request: Request, rights: KeyRights) -> Any:
        """Add or replace; on the disk when it is answered."""
        made, tenant = self._collection(request), _tenant(request, rights, write=True)
        raw = await self._body(request)

        def change() -> None:
            made.upsert([one.point() for one in read(UpsertBody, raw).points], tenant)

        await asyncio.to_thread(change)
        return {"operation_id": 0, "status": "completed"}

    async def delete(self, request: Request, rights: KeyRights) -> Any:
        """Remove; gone from the disk when it is answered."""
        made, tenant = self._collection(request), _tenant(request, rights, write=True)
        body = read(DeleteBody, await self._body(request))
        if body.filter is not None:
            await asyncio.to_thread(made.delete_where, body.filter, tenant)
        else:
            await asyncio.to_thread(made.delete, body.points or (), tenant)
        return {"operation_id": 0, "status": "completed"}

    async def retrieve(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        body = read(RetrieveBody, await self._body(request))
        found = await asyncio.to_thread(made.get, body.ids, tenant, vectors=body.with_vector)
        return [shown(one, body.with_payload) for one in found]

    async def point(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        name = point_id(request.path_params["id"])
        found = await asyncio.to_thread(made.get, [name], tenant, vectors=True)
        if not found:
            raise SearchError(f"Not found: Point with id {name} does not exists!", status=404)
        return shown(found[0], True)

    async def scroll(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        body = read(ScrollBody, await self._body(request))
        found, following = await asyncio.to_thread(
            made.scroll, tenant, body.limit, where=body.filter, offset=body.offset,
            vectors=body.with_vector,
        )  # fmt: skip
        points = [shown(one, body.with_payload) for one in found]
        return {"points": points, "next_page_offset": following}

    async def count(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        body = read(CountBody, await self._body(request))
        return {"count": await asyncio.to_thread(made.count, tenant, body.filter)}

    async def query(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        body = read(QueryBody, await self._body(request))
        return {"points": await asyncio.to_thread(_answered, made, tenant, body)}

    async def search(self, request: Request, rights: KeyRights) -> Any:
        made, tenant = self._collection(request), _tenant(request, rights)
        body = read(SearchBody, await self._body(request)).query()
        return await asyncio.to_thread(_answered, made, tenant, body)


def _answered(made: ServedCollection, tenant: str, body: QueryBody) -> list[dict[str, Any]]:
    """The points of an answer to a query, the best first."""
    most = min(body.limit + body.offset, POINTS)
    if body.query is None:
        found, _ = made.scroll(tenant, most, where=body.filter, vectors=body.with_vector)
    else:
        if isinstance(body.query, RankedBy):
            rankings = [
                _method(one.using).rank(
                    made, asked(one.query, one.params, tenant, one.filter, body.filter), one.limit
                )
                for one in body.prefetch
            ]
            hits: list[ScoredPoint] = fused(rankings, most, body.query.smoothing)
        else:
            query = asked(body.query, body.params, tenant, body.filter)
            hits = _method(body.using).rank(made, query, most)
        found = made.results(hits, tenant, vectors=body.with_vector)
    return [shown(one, body.with_payload) for one in found[body.offset :] if _good(made, one, body)]


def _method(name: str) -> SearchMethod:
    made: SearchMethod = table("search_method").build(name, where="using")
    return made


def _good(made: ServedCollection, point: ServedPoint, body: QueryBody) -> bool:
    """Whether a score reaches the threshold; distances are better when they are small."""
    if body.score_threshold is None or point.score is None:
        return True
    by_vector = not isinstance(body.query, RankedBy) and body.using == "dense"
    if by_vector and made.points.metric == "l2":
        return point.score <= body.score_threshold
    return point.score >= body.score_threshold


def _snapshots(made: ServedCollection) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "creation_time": datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
            "size": size,
        }
        for name, at, size in made.snapshots()
    ]


def _whole(rights: KeyRights) -> None:
    """Refuse a key that is of some tenants only."""
    if rights.tenants is not None or not rights.write:
        raise SearchError("the key may not do this; it is for points of its tenants", status=403)


def _tenant(request: Request, rights: KeyRights, *, write: bool = False) -> str:
    if write and not rights.write:
        raise SearchError("the key may not change points", status=403)
    return tenant_of(rights, request.headers.get(TENANT))
