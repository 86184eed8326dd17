"""Arrays and bitmaps inside JSON."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np

from shoal.fields.retrieve.serverless.protocols import FunctionError

_MOST = 1 << 28


def packed(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON: its type, shape, and bytes in base64."""
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"type": array.dtype.str, "shape": list(array.shape), "data": text}


def unpacked(value: Any, dtype: Any, dims: int) -> np.ndarray:
    """The array of :func:`packed`.

    Raises:
        FunctionError: it is none of that type.
    """
    try:
        shape = tuple(int(size) for size in value["shape"])
        array = np.frombuffer(base64.b64decode(value["data"], validate=True), value["type"])
        if array.dtype != dtype or len(shape) != dims:
            raise ValueError(f"{array.dtype} {shape}")
        return array.reshape(shape)
    except (KeyError, TypeError, ValueError, binascii.Error) as cause:
        raise FunctionError(f"payload: not an array of {np.dtype(dtype)}: {cause}") from cause


def compressed(bitmap: np.ndarray) -> str:
    """A bitmap, uint64, as text: compressed bytes in base64."""
    return base64.b64encode(zlib.compress(bitmap.tobytes(), 1)).decode()


def decompressed(text: Any, count: int) -> np.ndarray:
    """The bitmap of :func:`compressed`.

    Args:
        text: of it.
        count: rows.

    Raises:
        FunctionError: it is none, or not of so many rows.
    """
    words = -(-count // 64)
    try:
        data = base64.b64decode(text, validate=True)
        found = zlib.decompressobj().decompress(data, min(words * 8 + 1, _MOST))
        bitmap = np.frombuffer(found, np.uint64)
    except (TypeError, ValueError, binascii.Error, zlib.error) as cause:
        raise FunctionError(f"payload: not a bitmap: {cause}") from cause
    if len(bitmap) != words or (count % 64 and int(bitmap[-1]) >> (count % 64)):
        raise FunctionError(f"payload: a bitmap of another part; expected {count} rows")
    return bitmap
