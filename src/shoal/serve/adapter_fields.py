"""What a request to load or unload an adapter has, in vLLM's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.serve.fields import wrong

__all__ = ["read_adapter"]

_MOST = 4096


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
