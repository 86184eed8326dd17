"""Curves for MLflow, logged to a tracking server or a store.

The numeric fields of an event that has a ``step`` become the metrics ``<kind>/<field>``; the
newest counters and gauges go with them. Metrics are sent together every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Gt

from shoal.core.errors import ConfigError, StoreError
from shoal.core.extras import import_extra
from shoal.core.meter.protocols import curves_of, path_of
from shoal.core.parts import part

# Metrics that MLflow takes in one request.
_MOST = 1000


@part
class Mlflow:
    """Log curves to MLflow.

    Args:
        uri: tracking server or store, such as ``http://127.0.0.1:5000`` or
            ``sqlite:///mlflow.db``; MLflow's own setting (``MLFLOW_TRACKING_URI``) if None.
        experiment: experiment of the run; created if missing.
        run: name of the run in MLflow; chosen by MLflow if None.
        id: id of an existing MLflow run to continue, such as for a resumed job; a new run if None.
        every_s: s between two requests; each blocks training.
    """

    uri: str | None = None
    experiment: str = "shoal"
    run: str | None = None
    id: str | None = None
    every_s: Annotated[float, Gt(0)] = 5.0

    def open(self) -> MlflowWriter:
        """Begin the run there, or go on in it.

        Raises:
            ConfigError: the server or store cannot be used.
            MissingExtraError: mlflow is not installed.
        """
        return MlflowWriter(self)


class MlflowWriter:
    """The open run of an :class:`Mlflow` sink."""

    def __init__(self, sink: Mlflow) -> None:
        purpose = "the mlflow sink of the meter"
        mlflow = import_extra("mlflow", extra="mlflow", purpose=purpose)
        self._metric = import_extra("mlflow.entities", extra="mlflow", purpose=purpose).Metric
        self._refused = (
            OSError,
            import_extra("mlflow.exceptions", extra="mlflow", purpose=purpose).MlflowException,
        )
        self._sink = sink
        self._waiting: list[Any] = []
        self._last: dict[str, float] = {}
        self._step, self._sent = 0, time.monotonic()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=sink.uri)
            self._run = self._begun()
        except self._refused as cause:
            raise ConfigError(
                f"sink.mlflow: no run can begin at {sink.uri or 'the tracking URI of MLflow'} "
                f"({cause}); expected a tracking server or store that can be written"
            ) from cause

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Log the numeric fields of an event that names its step."""
        curves = curves_of(record)
        if not curves:
            return
        self._step = record["step"]
        self._take({**self._last, **curves}, record["time"])
        self._last.clear()
        if time.monotonic() - self._sent >= self._sink.every_s:
            self._send()

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Keep a counter's total for the next event."""
        self._last[path_of(name, labels)] = total

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Keep a gauge for the next event."""
        self._last[path_of(name, labels)] = value

    def close(self) -> None:
        """Log what is left and end the run there."""
        self._take(self._last, time.time())
        self._send()
        try:
            self._client.set_terminated(self._run)
        except self._refused as cause:
            raise self._broken(cause) from cause

    def _begun(self) -> str:
        """Identity of the run there."""
        if self._sink.id is not None:
            self._client.update_run(self._sink.id, status="RUNNING")
            return self._sink.id
        known = self._client.get_experiment_by_name(self._sink.experiment)
        experiment = (
            self._client.create_experiment(self._sink.experiment)
            if known is None
            else known.experiment_id
        )
        return str(self._client.create_run(experiment, run_name=self._sink.run).info.run_id)

    def _take(self, curves: Mapping[str, float], at: float) -> None:
        stamp = round(1e3 * at)
        self._waiting += [self._metric(key, y, stamp, self._step) for key, y in curves.items()]

    def _send(self) -> None:
        try:
            for first in range(0, len(self._waiting), _MOST):
                self._client.log_batch(self._run, metrics=self._waiting[first : first + _MOST])
        except self._refused as cause:
            raise self._broken(cause) from cause
        self._waiting.clear()
        self._sent = time.monotonic()

    def _broken(self, cause: Exception) -> StoreError:
        return StoreError(
            f"sink.mlflow: metrics of the run {self._run} cannot be logged ({cause}); "
            "is its server or store still there?"
        )
