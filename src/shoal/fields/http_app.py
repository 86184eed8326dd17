"""A small HTTP application of a field, with the keys, limits and errors of every server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

    from shoal.serve.http.app_server import AppMaker, AppOptions
    from shoal.serve.http.draining import DrainState
    from shoal.serve.http.guard import AccessControl


def app_maker(
    title: str, handlers: Mapping[str, Callable[..., Any]], options: AppOptions
) -> AppMaker:
    """What builds an application of some coroutines, for ``serve_app`` and ``running_app``.

    At most ``options.limits.open_requests`` are answered at a time, and an error of Shoal is
    answered as one, with status 400. ``GET /health`` needs no key.

    Args:
        title: of the application.
        handlers: ``METHOD /path`` -> coroutine function of a request.
        options: where it will listen.
    """

    def make(access: AccessControl, drain: DrainState) -> FastAPI:
        from fastapi import FastAPI
        from starlette.routing import Route

        from shoal.core.version import __version__
        from shoal.serve.http.api import protect
        from shoal.serve.http.concurrency import ConcurrencyLimit
        from shoal.serve.http.errors import ApiError, error_response

        app = FastAPI(title=title, version=__version__, docs_url=None, openapi_url=None)
        room = ConcurrencyLimit(options.limits.open_requests)

        def limited(handler: Callable[..., Any]) -> Callable[..., Any]:
            async def answer(request: Request) -> Any:
                with room.take(1):
                    return await handler(request)

            return answer

        async def health(_: Request) -> Any:
            from starlette.responses import JSONResponse

            return JSONResponse({"status": "ok"})

        async def refused(_: Request, cause: Exception) -> Any:
            return error_response(ApiError(str(cause)))

        async def stop() -> None:
            """What answers is its owner's."""

        app.state.stop = stop
        routes = {tuple(name.split()): limited(handler) for name, handler in handlers.items()}
        routes["GET", "/health"] = health
        for (method, path), handler in routes.items():
            app.router.routes.append(Route(path, handler, methods=[method]))
        app.add_exception_handler(ShoalError, refused)
        protect(
            app, lambda route, status: None, access=access, limits=options.limits, drain=drain,
            routes=[(method, path) for method, path in routes],
        )  # fmt: skip
        return app

    return make
