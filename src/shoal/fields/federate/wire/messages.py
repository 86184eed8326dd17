"""What travels: models and updates as safetensors, with a few words in the file's metadata.

Nothing that is read can execute. Every message is held against a size before it is parsed, and is
parsed where it lies: tensors are views of the bytes that came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.safetensors_header import read_header_from
from shoal.fields.federate.protocols import UpdateRefusedError

HEADER_BYTES = 1 << 16
"""Most bytes of a message beside its tensors."""
SESSION = "shoal-session"
"""Header with which a client says in which of its lives it is."""

_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def pack(tensors: Mapping[str, np.ndarray], words: Mapping[str, Any]) -> bytes:
    """A safetensors file with words in its metadata."""
    numpy = import_extra("safetensors.numpy", extra="run", purpose="messages of a federation")
    packed: bytes = numpy.save(dict(tensors), metadata={"words": json.dumps(words)})
    return packed


def unpack(data: bytes | bytearray | memoryview) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, which are views, and words of such a file.

    Raises:
        UpdateRefusedError: it is none.
    """
    # PyTorch warns of tensors that cannot be written, as those over bytes.
    view = memoryview(bytearray(data) if isinstance(data, bytes) else data)

    def read(start: int, stop: int) -> bytes:
        return bytes(view[start:stop])

    header = read_header_from(read, len(view), "message", error=UpdateRefusedError)
    tensors = {}
    for name, stored in header.tensors.items():
        if stored.dtype not in _TYPES:
            raise UpdateRefusedError(f"message: tensor {name[:40]!r} is {stored.dtype}")
        part = view[stored.start : stored.stop]
        tensors[name] = np.frombuffer(part, _TYPES[stored.dtype]).reshape(stored.shape)
    try:
        words = json.loads(header.metadata.get("words", "{}"))
    except (ValueError, RecursionError) as cause:
        raise UpdateRefusedError("message: its words are not JSON") from cause
    if not isinstance(words, dict):
        raise UpdateRefusedError("message: its words are no mapping")
    return tensors, words


def loss_of(words: Mapping[str, Any]) -> float:
    """The loss that a client states; 0 for what is no number."""
    loss = words.get("loss", 0.0)
    return float(loss) if isinstance(loss, int | float) and abs(loss) < 1e30 else 0.0
