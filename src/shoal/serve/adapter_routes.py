"""The routes that change which adapters are in memory, in vLLM's words, and which is merged.

===============================  ====================================================
``POST /v1/load_lora_adapter``   read an adapter from a directory (lora_name, lora_path)
``POST /v1/unload_lora_adapter``  forget it (lora_name)
``POST /v1/merge_lora_adapter``  compute with its weights merged into the model's
``POST /v1/unmerge_lora_adapter``  compute with the model's own weights again
===============================  ====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from shoal.serve.body import read_body
from shoal.serve.client import EngineClient
from shoal.serve.errors import ApiError
from shoal.serve.fields import wrong
from shoal.serve.limits import HttpLimits

__all__ = ["ADAPTER_ROUTES", "AdapterRoutes", "read_adapter"]

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
        limits: what a request may ask for.
        name: what the model is called in requests.
    """

    def __init__(self, client: EngineClient, limits: HttpLimits, name: str) -> None:
        self._client, self._limits, self._name = client, limits, name

    def add_to(self, app: FastAPI) -> None:
        """Open the routes."""
        handlers = self.load, self.unload, self.merge, self.unmerge
        for path, handler in zip(ADAPTER_ROUTES, handlers, strict=True):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def load(self, request: Request) -> Response:
        """Read an adapter from a directory of this machine."""
        name, path = read_adapter(await read_body(request, self._limits), path=True)
        if name == self._name:
            raise ApiError(
                f"lora_name = {name!r}: the model is called so; give another",
                param="lora_name",
                code="invalid_value",
            )
        await self._client.change_adapter("load", name, path)
        return _done(name)

    async def unload(self, request: Request) -> Response:
        """Forget an adapter."""
        return await self._change("unload", request)

    async def merge(self, request: Request) -> Response:
        """Put an adapter into the weights, until another model is asked for."""
        return await self._change("merge", request)

    async def unmerge(self, request: Request) -> Response:
        """Take it out again."""
        return await self._change("unmerge", request)

    async def _change(self, what: str, request: Request) -> Response:
        name, _ = read_adapter(await read_body(request, self._limits), path=False)
        await self._client.change_adapter(what, name)
        return _done(name)


def _done(name: str) -> Response:
    return JSONResponse({"status": "ok", "lora_name": name})


def read_adapter(body: Mapping[str, Any], *, path: bool) -> tuple[str, str]:
    """Name and directory of an adapter; no directory where none is wanted.

    Args:
        body: of the request.
        path: a directory is wanted.

    Raises:
        ApiError: a field is missing or wrong; names it.
    """
    name = body.get("lora_name")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        wrong("lora_name", name, "a name of 1 to 256 characters")
    place = body.get("lora_path", "")
    if not path:
        return name, ""
    if not isinstance(place, str) or not 0 < len(place) <= _MOST or not Path(place).is_dir():
        wrong("lora_path", place, "a directory of the server's machine with an adapter")
    return name, str(Path(place).absolute())
