"""Whether this host is quiet enough for a measurement to mean anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.errors import BuildError
from shoal.machine import host

# Above these the numbers describe the neighbours more than the machine.
MAX_LOAD_PER_CORE = 0.5
MAX_STEAL = 0.05
MAX_SPIN_SPREAD = 0.15


@dataclass(frozen=True)
class NoiseReport:
    """What was seen, and why it is doubtful.

    Args:
        load: runnable processes a core, before the probes.
        steal: share of the processor time that other guests took meanwhile.
        spin_spread: (95th - 5th percentile) / median of a spinning loop's clock.
        reasons: complaints; empty on a quiet machine.
    """

    load: float
    steal: float
    spin_spread: float
    reasons: tuple[str, ...]


class NoiseWatch:
    """Looks at the host when made and again at :meth:`seen`."""

    def __init__(self) -> None:
        self._cores = max(1, len(host.cpus()))
        self._load = host.load_average() / self._cores
        self._all, self._stolen = host.ticks()
        self._spins = _spins()

    def seen(self) -> NoiseReport:
        """What happened since this watch was made."""
        everything, stolen = host.ticks()
        steal = (stolen - self._stolen) / max(everything - self._all, 1.0)
        spreads = [_spread(spins) for spins in (self._spins, _spins()) if spins]
        spread = max(spreads, default=0.0)
        reasons = []
        if self._load > MAX_LOAD_PER_CORE:
            reasons.append(
                f"load average {self._load * self._cores:.1f} on {self._cores} cores; stop other "
                "programs"
            )
        if steal > MAX_STEAL:
            reasons.append(f"other guests of this host took {steal:.0%} of the processor time")
        if spread > MAX_SPIN_SPREAD:
            reasons.append(f"an idle loop varies by {spread:.0%}: the clock is unsteady or shared")
        return NoiseReport(self._load, steal, spread, tuple(reasons))


def _spins() -> list[float]:
    from shoal.machine.probes.units import clock_samples

    try:
        return clock_samples(repeats=40, blocks=10_000)
    except BuildError:  # the probes themselves report it; load and steal remain
        return []


def _spread(values: list[float]) -> float:
    low, middle, high = np.percentile(values, (5, 50, 95))
    return float((high - low) / middle)
