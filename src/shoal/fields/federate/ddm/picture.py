"""Images in a grid, as a PNG file."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np

_ENLARGED, _GAP = 4, 2


def image_grid(images: np.ndarray, low: float, high: float) -> bytes:
    """A PNG of images [N, H, W], dark ink on light.

    Args:
        images: numbers.
        low: white.
        high: black.
    """
    count, height, width = images.shape
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    tall, wide = height * _ENLARGED + _GAP, width * _ENLARGED + _GAP
    canvas = np.full((down * tall + _GAP, across * wide + _GAP), 224, np.uint8)
    shades = 255 * (1 - np.clip((images - low) / max(high - low, 1e-9), 0, 1))
    large = np.round(shades).astype(np.uint8).repeat(_ENLARGED, 1).repeat(_ENLARGED, 2)
    for at, image in enumerate(large):
        top, left = _GAP + at // across * tall, _GAP + at % across * wide
        canvas[top : top + tall - _GAP, left : left + wide - _GAP] = image
    return _png(canvas)


def _png(gray: np.ndarray) -> bytes:
    """Format: W3C, Portable Network Graphics, 2003; gray of eight bits without filters."""
    height, width = gray.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = np.concatenate([np.zeros((height, 1), np.uint8), gray], 1).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", head),
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        ]
    )
