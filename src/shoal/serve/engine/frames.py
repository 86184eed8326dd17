"""Frames between the processes of a server: length, then JSON.

A frame is four bytes, the length of the rest in big-endian order, and a JSON object in
UTF-8. Nothing that can execute is ever decoded, and a length beyond the cap ends the
connection before anything is allocated.

Every process of a server reads this module, and some read little else: it imports no values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.core.errors import ServeError

PRIVATE = frozenset({"SHOAL_API_KEY"})
"""Variables of the server that are not for its children."""

DEFAULT_FACTORY = "shoal.serve.engine.build:build_engine"
"""What builds an engine of one process."""

# A prompt of a million tokens, or the outputs of a step of a thousand requests with
# twenty log probabilities each, with room to spare.
MAX_FRAME_BYTES = 16 * 2**20

_LENGTH = struct.Struct(">I")


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
                    "message between server and engine is not a JSON object; restart the server"
                )
            yield message
