"""Reading the events of a run back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import StoreError

__all__ = ["read_events"]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a JSON-lines file in their order.

    A last line without its end is what a killed process leaves; it is left out.

    Raises:
        StoreError: the file cannot be read, or a whole line is not an event.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield _event(line, path, number)
    except OSError as cause:
        raise StoreError(f"{path}: cannot be read ({cause.strerror})") from cause


def _event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "kind" not in record:
        raise StoreError(
            f"{path}, line {number}: not an event; expected a JSON object with a kind; "
            "remove the line or the file"
        )
    return record
