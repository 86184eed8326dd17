"""Reading the events of a run back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.errors import StoreError


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
                yield _event(line, path, f"line {number}")
    except OSError as cause:
        raise StoreError(f"{path}: cannot be read ({cause.strerror})") from cause


class EventTail:
    """Each pass gives the whole lines that a file has got since the one before.

    Args:
        path: the file; what it has now is not given. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        # Up to the last whole line: opening the file for writing cuts a torn one off.
        self._at = len(self._new())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = self._new()
        at, self._at = self._at, self._at + len(data)
        for line in data.splitlines():
            yield _event(line, self._path, f"after byte {at:,}")

    def _new(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return b""
        return data[: data.rfind(b"\n") + 1]


def _event(line: bytes, path: Path, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "kind" not in record:
        raise StoreError(
            f"{path}, {where}: not an event; expected a JSON object with a kind; "
            "remove the line or the file"
        )
    return record
