"""The meter: events, counters and gauges of one process, handed to its sinks.

Events are the record of a run (one per step, save, evaluation ...). Counters only grow
and gauges move; they are for live views, and their last values are written as one
``totals`` event when the meter closes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.core.meter.protocols import Sink, SinkWriter, spelled


class Meter:
    """Takes measurements of a run and hands them to every sink. Safe to use from threads.

    Args:
        sinks: parts of kind ``sink``; with none the meter only keeps totals.
        labels: put on everything, such as ``{"rank": "0"}``.

    Raises:
        ShoalError: a sink cannot be opened; those opened before it are closed again.
    """

    def __init__(self, sinks: Sequence[Sink] = (), labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._writers: list[SinkWriter] = []
        self._closed = False
        with ExitStack() as undo:
            for sink in sinks:
                writer = sink.open()
                undo.callback(writer.close)
                self._writers.append(writer)
            undo.pop_all()

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened, now.

        Args:
            kind: what, such as ``step``; the fields of one kind have the same names.
            fields: plain values; ``step`` is the place on the x axis of live curves.
        """
        record: dict[str, Any] = {"time": time.time(), "kind": kind, **self._labels}
        for key, value in fields.items():
            if key in record:
                raise ValueError(f"event {kind}: the field {key!r} is the meter's own")
            record[key] = _plain(value)
        with self._lock:
            if self._closed:
                raise ValueError(f"event {kind}: the meter is closed")
            for writer in self._writers:
                writer.event(record, self._labels)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Let the counter ``name`` grow by ``amount`` >= 0; unit suffix in the name."""
        if not amount >= 0 or math.isinf(amount):
            raise ValueError(f"counter {name}: cannot grow by {amount}")
        key = spelled(name, labels)
        with self._lock:
            total = self._counters.get(key, 0.0) + float(amount)
            self._counters[key] = total
            for writer in self._writers:
                writer.counter(name, total, {**self._labels, **labels})

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Say that ``name`` is ``value`` now; unit suffix in the name."""
        with self._lock:
            self._gauges[spelled(name, labels)] = float(value)
            for writer in self._writers:
                writer.gauge(name, float(value), {**self._labels, **labels})

    def totals(self) -> dict[str, float]:
        """Counter, spelled ``name{label=value,...}`` -> total so far."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """Write the last totals and close every sink, even when one of them fails."""
        if self._closed:
            return
        try:
            if self._counters or self._gauges:
                self.event("totals", counters=self._counters, gauges=self._gauges)
        finally:
            self._closed = True
            with ExitStack() as stack:
                for writer in self._writers:
                    stack.callback(writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """``value`` as plain JSON; a number that JSON lacks becomes ``"nan"`` or ``"inf"``."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(mode="json"))
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays
        return _plain(value.tolist())
    raise TypeError(f"{type(value).__name__} is not a plain value; give numbers or text")
