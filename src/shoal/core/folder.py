"""Small JSON and text files of a model directory, read with a cap and a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.core.errors import ModelError

BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a ``tokenizer.json`` that say how it is used; any of them may be missing."""

_MAX_BYTES = 16 * 2**20


def read_text(path: Path, *, limit: int = _MAX_BYTES) -> str:
    """The text of a file.

    Raises:
        ModelError: it cannot be read, is larger than ``limit`` bytes or not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelError(
                f"{path}: {size} B: expected at most {limit} B; this is not such a file"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise ModelError(f"{path}: not text in UTF-8; fetch the file again") from cause
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror or cause})") from cause


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: it cannot be read or is not a JSON object.
    """
    try:
        raw = json.loads(read_text(path))
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path}: not JSON ({cause}); fetch the file again") from cause
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the file again")
    return raw
