"""What a sink is: a part that opens a writer.

A part is frozen, so the open file or server lives in the writer. The meter calls its
writers under one lock, one call at a time; they need no locks of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SinkWriter(Protocol):
    """The open end of a sink. Nothing is called after :meth:`close`."""

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """One event, as plain JSON values with ``time`` (s since 1970) and ``kind``.

        The meter's own ``labels`` stand in the record too.
        """

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """The new total of a counter, the meter's own labels included."""

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """The new value of a gauge, the meter's own labels included."""

    def close(self) -> None:
        """Write what is left and let go of files and ports."""


@runtime_checkable
class Sink(Protocol):
    """A part of kind ``sink``: where the meter's numbers go."""

    def open(self) -> SinkWriter:
        """Start writing.

        Raises:
            ConfigError: the place cannot be used.
            MissingExtraError: an optional package is not installed.
        """


def spelled(name: str, labels: Mapping[str, str]) -> str:
    """``name{label=value,...}``, labels in order of their names; plain without labels."""
    if not labels:
        return name
    inner = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
    return f"{name}{{{inner}}}"


def path_of(name: str, labels: Mapping[str, str]) -> str:
    """``name/label.value/...`` of letters that every tracking service takes in a name."""
    parts = [name, *(f"{key}.{labels[key]}" for key in sorted(labels))]
    return "/".join(re.sub(r"[^\w. -]", "_", part, flags=re.ASCII) for part in parts)


def curves_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of an event as ``kind/field``; none if it does not name its step."""
    if not isinstance(record.get("step"), int):
        return {}
    return {
        f"{record['kind']}/{field}": float(value)
        for field, value in record.items()
        if field not in ("time", "step")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }
