"""What a probe is, and what it is given.

A probe measures in native code (or in a child process with torch); a Python timer
never stands inside a measured loop. It hands its raw samples to its context, which
makes them :class:`~shoal.ir.machine.Measurement` values; what cannot be measured here
is skipped with a reason and leaves no number behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.core.errors import require
from shoal.core.files import shoal_home
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.worker import TorchWorker


@dataclass(frozen=True)
class ProbeSamples:
    """The raw repeats behind one measurement."""

    probe: str
    quantity: str
    unit: str
    at: float | None
    values: tuple[float, ...]


@dataclass
class ProbeContext:
    """What a run of probes shares. Use it in a ``with`` block: it may own a child process.

    Args:
        fast: seconds for everything, instead of minutes.
        home: directory whose file system the disk probes use.
        cpus: the cores to measure.
    """

    fast: bool = True
    home: Path = field(default_factory=shoal_home)
    cpus: tuple[int, ...] = field(default_factory=host.cpus)
    samples: list[ProbeSamples] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _worker: TorchWorker | None = None

    def measured(
        self,
        probe: str,
        quantity: str,
        unit: str,
        values: Sequence[float],
        *,
        at: float | None = None,
        plausible: bool = True,
        note: str = "",
    ) -> Measurement:
        """Keep the raw repeats and sum them up: median, 5th and 95th percentile."""
        require(len(values) > 0, f"probe {probe}.{quantity}", values, expected="some samples")
        self.samples.append(ProbeSamples(probe, quantity, unit, at, tuple(map(float, values))))
        low, median, high = (float(x) for x in np.percentile(values, (5, 50, 95)))
        return Measurement(
            probe=probe,
            quantity=quantity,
            unit=unit,
            median=median,
            low=low,
            high=high,
            repeats=len(values),
            at=at,
            plausible=plausible and median > 0,
            note=note,
        )

    def skip(self, place: str, reason: str) -> None:
        """Note why ``probe`` or ``probe.quantity`` was not measured."""
        self.skipped[place] = reason

    def worker(self) -> TorchWorker:
        """The child process with torch, started when a probe first needs it or one has ended."""
        if self._worker is None or self._worker.ended:
            self._worker = TorchWorker()
        return self._worker

    def __enter__(self) -> ProbeContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, if one was started."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


@runtime_checkable
class Probe(Protocol):
    """One microbenchmark."""

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Measure; skip with a reason what this machine does not have.

        Every measurement is marked ``plausible`` or not by the probe's own check: a
        latency is not below one cycle and does not fall with the footprint, a bandwidth
        is below what the level nearer to the core gives, a unit's rate is below
        clock x width.

        Raises:
            MachineError: the probe was given an impossible option, such as a footprint
                above the free memory.
        """
