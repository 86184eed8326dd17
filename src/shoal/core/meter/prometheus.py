"""Live numbers for Prometheus: served over HTTP, or in a file for the node exporter.

Counters and gauges keep their names behind ``shoal_``; the numeric fields of an event
become gauges ``shoal_<kind>_<field>``, so the events of a run can be watched as they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt

from shoal.core.errors import ConfigError, StoreError, require
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.parts import part

_Key = tuple[tuple[str, str], ...]


@part
class Prometheus:
    """Export counters, gauges and event fields to Prometheus.

    Args:
        port: port of the HTTP server, 0 for any free one; -1 for no server.
        address: address the server listens on.
        textfile: a file for the node exporter's textfile collector, or None.
        every_s: s between two writes of the text file.
    """

    port: int = 9464
    address: str = "127.0.0.1"
    textfile: Path | None = None
    every_s: Annotated[float, Gt(0)] = 5.0

    def __post_init__(self) -> None:
        """Check the options."""
        require(
            -1 <= self.port <= 65535,
            "sink.prometheus.port",
            self.port,
            expected="a port, 0 for any free one, or -1 for no server",
        )
        require(
            self.port >= 0 or self.textfile is not None,
            "sink.prometheus.port",
            self.port,
            expected="a port, or a textfile beside -1",
            hint="with neither nobody would see the numbers",
        )

    def open(self) -> PrometheusWriter:
        """Start the server, or get ready to write the file.

        Raises:
            ConfigError: the port is taken.
            MissingExtraError: prometheus-client is not installed.
        """
        return PrometheusWriter(self)


class PrometheusWriter:
    """Registry, and server or file, of an open :class:`Prometheus` sink."""

    def __init__(self, sink: Prometheus) -> None:
        self._client = import_extra(
            "prometheus_client", extra="run", purpose="the prometheus sink of the meter"
        )
        self._core = import_extra(
            "prometheus_client.core", extra="run", purpose="the prometheus sink of the meter"
        )
        self._sink = sink
        self._values: dict[tuple[str, str], dict[_Key, float]] = {}
        self._registry = self._client.CollectorRegistry()
        self._registry.register(self)
        self._server: Any = None
        self._thread: Any = None
        self._written = 0.0
        if sink.port >= 0:
            try:
                self._server, self._thread = self._client.start_http_server(
                    sink.port, addr=sink.address, registry=self._registry
                )
            except OSError as cause:
                raise ConfigError(
                    f"sink.prometheus.port = {sink.port}: cannot listen on {sink.address} "
                    f"({cause.strerror or cause}); choose another port, or 0 for any free one"
                ) from cause

    @property
    def port(self) -> int | None:
        """The port that is served, or None."""
        return int(self._server.server_port) if self._server is not None else None

    def collect(self) -> Iterator[Any]:
        """What a scrape sees; called by the registry, also from the server's threads."""
        families = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
        }
        for (kind, name), series in list(self._values.items()):
            copied = dict(series)
            # One family has one set of label names; an empty label is an absent one.
            labels = sorted({label for key in copied for label, _ in key})
            family = families[kind](name, name.replace("_", " "), labels=labels)
            for key, value in copied.items():
                given = dict(key)
                family.add_metric([given.get(label, "") for label in labels], value)
            yield family

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Show the numeric fields of the event as gauges."""
        for field, value in record.items():
            if field != "time" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._put("gauge", f"{record['kind']}_{field}", float(value), labels)
        self._write_file()

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Show a counter."""
        self._put("counter", name, total, labels)
        self._write_file()

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Show a gauge."""
        self._put("gauge", name, value, labels)
        self._write_file()

    def close(self) -> None:
        """Write the file a last time and stop the server."""
        try:
            self._write_file(last=True)
        finally:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()

    def _put(self, kind: str, name: str, value: float, labels: Mapping[str, str]) -> None:
        series = self._values.setdefault((kind, _legal(f"shoal_{name}")), {})
        series[tuple(sorted((_legal(key), item) for key, item in labels.items()))] = value

    def _write_file(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._sink.textfile is None or (now - self._written < self._sink.every_s and not last):
            return
        self._written = now
        text = self._client.generate_latest(self._registry)
        write_atomic(self._sink.textfile, text, error=StoreError)


def _legal(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
