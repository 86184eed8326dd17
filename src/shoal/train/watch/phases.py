"""What a rank computes: the phases of its steps, with the time it was kept waiting left out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from shoal.train.watch.evidence import Evidence
from shoal.train.watch.recorder import COMPUTE, Flight

# A phase with this share of what a rank computes longer than others explains it.
_MOST = 0.5


class OpenPhase(NamedTuple):
    """A phase that a rank has begun and not ended.

    Args:
        name: forward, backward, load, update, checkpoint or evaluate.
        enter: when it began, ns of the rank's clock.
    """

    name: str
    enter: int


def open_phases(flight: Flight) -> list[OpenPhase]:
    """Phases that the rank is in, the outermost first."""
    if COMPUTE not in flight.names:
        return []
    rows = flight.rows
    rows = rows[(rows["op"] == flight.names.index(COMPUTE)) & (rows["left"] == 0)]
    return [
        OpenPhase(flight.names[tag], enter)
        for tag, enter in zip(rows["tag"].tolist(), rows["enter"].tolist(), strict=True)
    ]


class Excess(NamedTuple):
    """The phase in which a rank is slower than others.

    Args:
        ratio: how many times as long as on the others.
        share: of all that the rank computes longer.
    """

    phase: str
    ratio: float
    share: float

    def __str__(self) -> str:
        times = "" if self.ratio == float("inf") else f" ({self.ratio:.2f} times)"
        return f"{self.share:.0%} of the difference is in {self.phase}{times}"


def excess(
    evidence: Evidence, rank: int, others: Sequence[int], steps: Sequence[int]
) -> Excess | None:
    """The phase that explains why a rank computes longer than others with the same work.

    Args:
        evidence: the records.
        rank: the slow one.
        others: those with the same work.
        steps: that are compared.

    Returns:
        None where no phase explains half of the difference, or phases were not recorded.
    """
    phases = evidence.phases
    names = sorted({name for one in others for step in phases[one].values() for name in step})

    def median(one: int, name: str) -> float:
        return statistics.median(phases[one].get(step, {}).get(name, 0.0) for step in steps)

    own = {name: median(rank, name) for name in names}
    usual = {
        name: statistics.median(median(one, name) for one in others if one != rank)
        for name in names
    }
    more = {name: max(0.0, own[name] - usual[name]) for name in names}
    total = sum(more.values())
    if not total:
        return None
    worst = max(names, key=lambda name: more[name])
    if more[worst] < _MOST * total:
        return None
    ratio = own[worst] / usual[worst] if usual[worst] else float("inf")
    return Excess(worst, ratio, more[worst] / total)
