"""What a detector of anomalies is, what it is given, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.fields.data.logs.native import Bools
from shoal.fields.data.logs.protocols import Ints, LogWork

if TYPE_CHECKING:
    from shoal.ir import Estimate, Machine

Floats = npt.NDArray[np.float64]


class EventGroups(NamedTuple):
    """Lines by session or window, as events.

    Args:
        names: of the n groups.
        sequences: template of each line of a group, in the order of the log.
        templates: how many templates there are.
        labels: which groups are anomalies, where somebody has said so; else None.
    """

    names: list[str]
    sequences: list[Ints]
    templates: int
    labels: Bools | None

    def counts(self) -> Floats:
        """Float64 [n, templates]: how often each event occurs in each group."""
        rows = [np.bincount(one, minlength=self.templates) for one in self.sequences]
        return np.array(rows, np.float64).reshape(len(rows), self.templates)


class Detection(NamedTuple):
    """What a detector says of each group.

    Args:
        scores: float64 [n], higher is more unusual.
        anomalous: which are above the detector's threshold.
        judged: which the detector has not learned from with their labels.
    """

    scores: Floats
    anomalous: Bools
    judged: Bools


@runtime_checkable
class AnomalyDetector(Protocol):
    """A part of kind ``anomaly_detector``: one way to tell unusual groups of events."""

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Seconds of the detection alone, and bytes of memory by cause."""

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score all groups.

        Raises:
            DataError: there are too few groups, or no labels where they are needed.
        """
