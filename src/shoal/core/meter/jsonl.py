"""Events as JSON lines: the record that every run keeps.

Each event is one line, handed to the operating system at once, so a killed process
loses at most the line it was writing.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shoal.core.errors import StoreError
from shoal.core.parts import part


@part
class JsonlSink:
    """Append each event to a file.

    Args:
        path: path of the file; a resumed run appends to it.
    """

    path: Path

    def open(self) -> JsonlWriter:
        """Open the file for appending; a torn last line of a killed process is cut off.

        Raises:
            StoreError: the file cannot be written.
        """
        return JsonlWriter(self.path)


class JsonlWriter:
    """The open file of a :class:`JsonlSink` sink."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as cause:
            raise self._refused(cause) from cause

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Write one line; the wall clock of an event is for people, the monotonic one for sums."""
        stamped = {**record, "monotonic_s": time.monotonic()}
        line = json.dumps(stamped, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            # Unbuffered, and one call: lines of several processes do not mix.
            written = self._file.write(line)
        except OSError as cause:
            raise self._refused(cause) from cause
        if written != len(line):
            end = self._file.tell()
            if os.fstat(self._file.fileno()).st_size == end:  # no process has written since
                self._file.truncate(end - written)
            raise self._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Counters are written once, in the ``totals`` event of the meter."""

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Gauges are written once, in the ``totals`` event of the meter."""

    def close(self) -> None:
        """Make the events durable and close the file."""
        try:
            os.fsync(self._file.fileno())
        except OSError as cause:
            raise self._refused(cause) from cause
        finally:
            self._file.close()

    def _refused(self, cause: OSError) -> StoreError:
        return StoreError(
            f"{self._path}: events cannot be written ({cause.strerror or cause}); "
            "free some space or choose another place"
        )


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)
