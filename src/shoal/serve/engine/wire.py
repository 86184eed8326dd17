"""Messages between the HTTP process and the engine's: length, then JSON.

A frame is four bytes, the length of the rest in big-endian order, and a JSON object in
UTF-8. Nothing that can execute is ever decoded, and a length beyond the cap ends the
connection before anything is allocated.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from shoal.core.errors import ServeError
from shoal.ir.serving import Output, Request, SamplingParams, TokenInfo

__all__ = [
    "MAX_FRAME_BYTES",
    "Decoder",
    "encode",
    "pack_output",
    "pack_params",
    "pack_request",
    "unpack_output",
    "unpack_params",
    "unpack_request",
]

# A prompt of a million tokens, or the outputs of a step of a thousand requests with
# twenty log probabilities each, with room to spare.
MAX_FRAME_BYTES = 16 * 2**20

_LENGTH = struct.Struct(">I")
_PARAMS = tuple(field.name for field in fields(SamplingParams))


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes.

    Raises:
        ServeError: it is larger than :data:`MAX_FRAME_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ServeError(
            f"message to the engine: {len(body)} B: expected at most {MAX_FRAME_BYTES} B; "
            "send a shorter prompt"
        )
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes as they come, messages as they are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Take in bytes; yield the messages that they complete.

        Raises:
            ServeError: a frame is longer than the cap or no JSON object; the connection
                cannot be used after that.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ServeError(
                    f"message of {length} B between server and engine: expected at most "
                    f"{MAX_FRAME_BYTES} B; one of the two is not Shoal"
                )
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as cause:
                raise ServeError(
                    f"message between server and engine is no JSON ({cause}); restart the server"
                ) from cause
            if not isinstance(message, dict):
                raise ServeError(
                    "message between server and engine is no JSON object; restart the server"
                )
            yield message


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """How to sample, as plain values."""
    packed = {name: getattr(params, name) for name in _PARAMS}
    return {**packed, "stop_ids": sorted(params.stop_ids)}


def unpack_params(raw: Mapping[str, Any]) -> SamplingParams:
    """The inverse of :func:`pack_params`."""
    bias = tuple((token, value) for token, value in raw["logit_bias"])
    stop_ids = frozenset(raw["stop_ids"])
    return SamplingParams(**{**raw, "stop_ids": stop_ids, "logit_bias": bias})


def pack_request(request: Request) -> dict[str, Any]:
    """A request that is to be computed, as plain values."""
    return {
        "id": request.id,
        "tokens": list(request.tokens),
        "n_prompt": request.n_prompt,
        "params": pack_params(request.params),
        "priority": request.priority,
        "adapter": request.adapter,
        "salt": request.salt,
        "fork_of": request.fork_of,
    }


def unpack_request(raw: Mapping[str, Any]) -> Request:
    """The inverse of :func:`pack_request`; the request arrives now."""
    return Request(
        id=raw["id"],
        tokens=list(raw["tokens"]),
        n_prompt=raw["n_prompt"],
        params=unpack_params(raw["params"]),
        arrival=time.monotonic(),
        priority=raw["priority"],
        adapter=raw["adapter"],
        salt=raw["salt"],
        fork_of=raw["fork_of"],
    )


def pack_output(output: Output) -> list[Any]:
    """What a step gave one request, as plain values."""
    infos = [[info.logprob, info.top] for info in output.infos]
    return [output.request_id, output.tokens, infos, output.finish, output.cached]


def unpack_output(raw: list[Any]) -> Output:
    """The inverse of :func:`pack_output`."""
    request_id, tokens, infos, finish, cached = raw
    return Output(
        request_id,
        tuple(tokens),
        tuple(
            TokenInfo(logprob, tuple((token, value) for token, value in top))
            for logprob, top in infos
        ),
        finish,
        cached,
    )
