"""Curves for Weights & Biases, sent as the run goes on or kept for ``wandb sync``.

The numeric fields of an event that has a ``step`` become the curves ``<kind>/<field>``; the
newest counters and gauges go with the next such event. The horizontal axis is ``step``, so a
resumed run may go back some steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.core.errors import ConfigError
from shoal.core.extras import import_extra
from shoal.core.meter.protocols import curves_of, path_of
from shoal.core.parts import part


@part
class WeightsAndBiases:
    """Send curves to Weights & Biases.

    Args:
        project: project of the run.
        path: directory of wandb's own files; created if missing.
        run: name of the run; chosen by wandb if None.
        entity: user or team; the default one of the key if None.
        id: id of the run; a resumed job with the same id continues it.
        mode: ``online`` sends at once, ``offline`` writes files for ``wandb sync``; ``WANDB_MODE``
            if None.
    """

    project: str = "shoal"
    path: Path = Path()
    run: str | None = None
    entity: str | None = None
    id: str | None = None
    mode: Literal["online", "offline"] | None = None

    def open(self) -> WandbWriter:
        """Begin the run there.

        Raises:
            ConfigError: wandb refuses, such as without a key, or the directory cannot be written.
            MissingExtraError: wandb is not installed.
        """
        return WandbWriter(self)


class WandbWriter:
    """The open run of a :class:`WeightsAndBiases` sink."""

    def __init__(self, sink: WeightsAndBiases) -> None:
        wandb = import_extra("wandb", extra="wandb", purpose="the wandb sink of the meter")
        self._last: dict[str, float] = {}
        self._step = 0
        try:
            sink.path.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=sink.project,
                dir=str(sink.path),
                name=sink.run,
                entity=sink.entity,
                id=sink.id,
                resume=None if sink.id is None else "allow",
                mode=sink.mode,
                # Another run of this process stays as it is.
                reinit="create_new",
                # The output of a rank stays in its own log.
                settings=wandb.Settings(console="off"),
            )
        except (OSError, wandb.errors.Error) as cause:
            raise ConfigError(
                f"sink.wandb: no run of the project {sink.project!r} can begin ({cause}); "
                "log in with `wandb login`, or choose mode: offline"
            ) from cause
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Send the numeric fields of an event that names its step."""
        curves = curves_of(record)
        if curves:
            self._step = record["step"]
            self._send(curves)

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Keep a counter's total for the next event."""
        self._last[path_of(name, labels)] = total

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Keep a gauge for the next event."""
        self._last[path_of(name, labels)] = value

    def close(self) -> None:
        """Send what is left and end the run there."""
        try:
            if self._last:
                self._send({})
        finally:
            self._run.finish()

    def _send(self, curves: Mapping[str, float]) -> None:
        self._run.log({**self._last, **curves, "step": self._step})
        self._last.clear()
