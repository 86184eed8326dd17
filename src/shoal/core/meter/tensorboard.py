"""Curves for TensorBoard, written without torch or TensorFlow.

The numeric fields of an event that has a ``step`` become the curves ``<kind>/<field>``;
counters and gauges are drawn at the last step that an event named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import StoreError
from shoal.core.extras import import_extra
from shoal.core.meter.protocols import curves_of, spelled
from shoal.core.parts import part


@part
class TensorBoard:
    """Write event files for TensorBoard.

    Args:
        path: directory of the event files, one per run.
    """

    path: Path

    def open(self) -> TensorBoardWriter:
        """Create the directory and a new event file in it.

        Raises:
            StoreError: the directory cannot be written.
            MissingExtraError: tensorboard is not installed.
        """
        return TensorBoardWriter(self.path)


class TensorBoardWriter:
    """The open event file of a :class:`TensorBoard` sink."""

    def __init__(self, path: Path) -> None:
        purpose = "the tensorboard sink of the meter"
        files = import_extra(
            "tensorboard.summary.writer.event_file_writer", extra="run", purpose=purpose
        )
        self._events = import_extra(
            "tensorboard.compat.proto.event_pb2", extra="run", purpose=purpose
        )
        self._summaries = import_extra(
            "tensorboard.compat.proto.summary_pb2", extra="run", purpose=purpose
        )
        self._path = path
        self._step = 0
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = files.EventFileWriter(str(path))
        except OSError as cause:
            raise StoreError(
                f"{path}: TensorBoard files cannot be written ({cause.strerror or cause}); "
                "choose another directory"
            ) from cause

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Draw the numeric fields of an event that names its step."""
        curves = curves_of(record)
        if curves:
            self._step = record["step"]
            self._draw(curves, record["time"])

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Draw a counter's total."""
        self._draw({spelled(name, labels): total})

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Draw a gauge."""
        self._draw({spelled(name, labels): value})

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._file.close()

    def _draw(self, curves: Mapping[str, float], wall_time: float | None = None) -> None:
        summary = self._summaries.Summary(
            value=[
                self._summaries.Summary.Value(tag=tag, simple_value=value)
                for tag, value in curves.items()
            ]
        )
        event = self._events.Event(step=self._step, summary=summary)
        if wall_time is not None:
            event.wall_time = wall_time
        self._file.add_event(event)
