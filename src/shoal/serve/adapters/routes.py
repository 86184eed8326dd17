"""The routes that change which adapters are in memory, in vLLM's words, and which is merged.

===============================  ====================================================
``POST /v1/load_lora_adapter``   read an adapter from an allowed directory (lora_name, lora_path)
``POST /v1/unload_lora_adapter``  forget it (lora_name)
``POST /v1/merge_lora_adapter``  compute with its weights merged into the model's
``POST /v1/unmerge_lora_adapter``  compute with the model's own weights again
===============================  ====================================================

Callers name directories of the server's machine. Only those below one root can be read, and those
that the server was started with; every other path gets the same answer, whether it exists or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from shoal.serve.engine.client import EngineClient
from shoal.serve.http.body import read_body
from shoal.serve.http.errors import ApiError
from shoal.serve.http.fields import wrong
from shoal.serve.http.limits import HttpLimits

ADAPTER_ROUTES = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/merge_lora_adapter",
    "/v1/unmerge_lora_adapter",
)
"""Endpoints that ``--adapter-routes`` adds: POST, with vLLM's fields."""

_MOST = 4096


class AdapterRoutes:
    """The handlers.

    Args:
        client: of the engine.
        limits: limits of the options of a request.
        name: what the model is called in requests.
        places: where adapters may be read from.
    """

    def __init__(
        self, client: EngineClient, limits: HttpLimits, name: str, places: AdapterPlaces
    ) -> None:
        self._client, self._limits, self._name, self._places = client, limits, name, places

    def add_to(self, app: FastAPI) -> None:
        """Open the routes."""
        handlers = self.load, self.unload, self.merge, self.unmerge
        for path, handler in zip(ADAPTER_ROUTES, handlers, strict=True):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def load(self, request: Request) -> Response:
        """Read an adapter from a directory of this machine."""
        body = await read_body(request, self._limits)
        name, path = read_adapter(body), self._places.find(body.get("lora_path"))
        if name == self._name:
            raise ApiError(
                f"lora_name = {name!r}: the model is called so; give another",
                param="lora_name",
                code="invalid_value",
            )
        await change(self._client, "load", name, path)
        return _done(name)

    async def unload(self, request: Request) -> Response:
        """Forget an adapter."""
        return await self._change("unload", request)

    async def merge(self, request: Request) -> Response:
        """Merge an adapter into the weights until another model is requested."""
        return await self._change("merge", request)

    async def unmerge(self, request: Request) -> Response:
        """Take it out again."""
        return await self._change("unmerge", request)

    async def _change(self, what: str, request: Request) -> Response:
        name = read_adapter(await read_body(request, self._limits))
        await change(self._client, what, name)
        return _done(name)


async def change(client: EngineClient, what: str, name: str, path: str = "") -> None:
    """Load an adapter, unload, merge or unmerge it.

    A restarted engine has what was loaded, and nothing merged.

    Args:
        client: of the engine.
        what: ``load``, ``unload``, ``merge`` or ``unmerge``.
        name: of the adapter.
        path: where it lies, to load it.

    Raises:
        EngineDownError: the engine is not there, or died meanwhile.
        ApiError: the engine cannot; says why.
    """
    no_room = "this engine has no room for adapters; serve with --max-adapters"
    error = await client.ask("adapter", otherwise=no_room, do=what, name=name, path=path)
    if error is not None:
        # What is wrong with a directory is said of the directory.
        param = None if what == "load" else "lora_name"
        raise ApiError(error, param=param, code="request_refused")
    if what in ("load", "unload"):
        job = client.job
        kept = {key: value for key, value in job.adapters.items() if key != name}
        if what == "load":
            kept[name] = path
        room = job.room_for_adapters
        client.job = job.model_copy(update={"adapters": kept, "max_adapters": room})


def _done(name: str) -> Response:
    return JSONResponse({"status": "ok", "lora_name": name})


def read_adapter(body: Mapping[str, Any]) -> str:
    """Name of an adapter.

    Args:
        body: of the request.

    Raises:
        ApiError: it is missing or wrong.
    """
    name = body.get("lora_name")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        wrong("lora_name", name, "a name of 1 to 256 characters")
    return name


class AdapterPlaces:
    """Directories from which callers may have adapters read.

    Args:
        root: everything below it; relative paths begin there. None allows nothing further.
        given: directories that are allowed besides.
    """

    def __init__(self, root: str | None, given: Iterable[str] = ()) -> None:
        self._root = None if root is None else Path(root).resolve()
        self._given = frozenset(Path(one).resolve() for one in given)

    def find(self, path: object) -> str:
        """The directory of a request, without symbolic links.

        Raises:
            ApiError: it is not allowed, or is not there, which the error does not distinguish.
        """
        result = self._resolved(path) if isinstance(path, str) and 0 < len(path) <= _MOST else None
        if result is None:
            wrong(
                "lora_path", path, "a directory with an adapter below the server's --adapter-root"
            )
        return str(result)

    def _resolved(self, path: str) -> Path | None:
        try:
            # Not Path.resolve, to which a loop of links is an error of its own.
            place = Path(os.path.realpath((self._root or Path()) / path))
            if place in self._given or (self._inside(place) and place.is_dir()):
                return place
        except (OSError, ValueError):  # too long, not to be read, or no path at all
            return None
        return None

    def _inside(self, place: Path) -> bool:
        """Whether a directory and the files in it, which may be links, are below the root."""
        root = self._root
        if root is None or not place.is_relative_to(root):
            return False
        files = (Path(os.path.realpath(file)) for file in place.iterdir())
        return all(file.is_relative_to(root) for file in files)
