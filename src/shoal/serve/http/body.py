"""JSON bodies, read with caps: the size while it arrives, depth and parts before it is parsed."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from shoal.serve.http.errors import ApiError
from shoal.serve.http.limits import HttpLimits

# Parsing less takes less time than handing it to a thread.
_INLINE_BYTES = 2**15

# A string, or what is left of one; nothing is looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_body(request: Request, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        ApiError: no JSON object, too large, or nested too deeply.
        ClientDisconnect: the client has gone.
    """
    return await parsed(await read_bytes(request, limits), limits)


async def parsed(data: bytes, limits: HttpLimits) -> dict[str, Any]:
    """What :func:`parse_body` makes of ``data``, without holding up others for long."""
    if len(data) <= _INLINE_BYTES:
        return parse_body(data, limits)
    return await asyncio.to_thread(parse_body, data, limits)


async def read_bytes(request: Request, limits: HttpLimits) -> bytes:
    """The body of a request that says to be JSON.

    Raises:
        ApiError: it is of another type, or too large.
        ClientDisconnect: the client has gone.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise ApiError(
            f"Content-Type = {kind[:80]!r}: expected application/json",
            status=415,
            code="unsupported_media_type",
        )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.body_bytes:
        raise _too_large(limits)
    data = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > limits.body_bytes:
            raise _too_large(limits)
        more = message.get("more_body", False)
    return bytes(data)


def _too_large(limits: HttpLimits) -> ApiError:
    return ApiError(
        f"body: expected at most {limits.body_bytes} B; send a shorter prompt",
        status=413,
        code="body_too_large",
    )


def parse_body(data: bytes, limits: HttpLimits) -> dict[str, Any]:
    """The JSON object in ``data``.

    Raises:
        ApiError: it is none, nested too deeply, or of too many parts.
    """
    _check_strings(data, limits)
    _check_nesting(data, limits)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as cause:
        raise ApiError(
            f"body: not JSON ({cause}); send a JSON object", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(
            f"body: a JSON {type(value).__name__}: expected a JSON object", code="invalid_json"
        )
    return value


def _check_strings(data: bytes, limits: HttpLimits) -> None:
    """Count quotes that begin or end a string: to make each an object takes much longer."""
    most = 2 * limits.json_strings
    if data.count(b'"') <= most:
        return
    # Without pairs of backslashes, one before a quote always escapes it.
    single = data.replace(rb"\\", b"")
    if single.count(b'"') - single.count(rb"\"") > most:
        raise ApiError(
            f"body: expected at most {limits.json_strings} strings, names of fields included; "
            "send less",
            code="invalid_json",
        )


def _check_nesting(data: bytes, limits: HttpLimits) -> None:
    """Count brackets outside of strings: a few megabytes of them would be a million objects."""
    if data.count(b"[") + data.count(b"{") <= limits.json_depth:
        return
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    if len(brackets) > 2 * limits.json_containers:
        raise ApiError(
            f"body: expected at most {limits.json_containers} lists and objects; send less",
            code="invalid_json",
        )
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.json_depth:
            raise ApiError(
                f"body: nested deeper than {limits.json_depth} levels; send plainer JSON",
                code="invalid_json",
            )
