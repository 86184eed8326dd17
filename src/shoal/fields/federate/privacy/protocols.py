"""What a model may reveal of a single client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from shoal.fields.federate.protocols import Arrived, LocalJob


@dataclass(frozen=True, kw_only=True)
class PrivacyWork:
    """What the planner knows of a run whose privacy is accounted for.

    Args:
        clients: of the federation.
        aggregations: of the run.
        updates: of each.
        pool: clients from which those of an aggregation are drawn; ``updates`` if they are not.
    """

    clients: int
    aggregations: int
    updates: int
    pool: int


class PrivacyState(Protocol):
    """Privacy at work; each client and the server has one.

    Attributes:
        reads: the server must see each update.
    """

    reads: bool

    def share(self, delta: np.ndarray, job: LocalJob) -> np.ndarray:
        """What a client gives away of its change float32 [P]."""

    def bound(self, delta: np.ndarray) -> np.ndarray:
        """What the server takes of a change float32 [P]."""

    def release(self, direction: np.ndarray, arrived: Arrived, pool: int) -> np.ndarray:
        """What becomes known of a combined update float32 [P], which is accounted for.

        Args:
            direction: weighted sum of the updates.
            arrived: these updates.
            pool: clients from which theirs were drawn at random; their number if they were not.

        Raises:
            FederationError: the budget does not allow it.
        """

    def measured(self) -> dict[str, float]:
        """Quantities of the report."""

    def refusal(self) -> str:
        """Why nothing more may be released; empty while something may."""

    def state(self) -> dict[str, np.ndarray]:
        """What it keeps, by name."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from such a state."""


@runtime_checkable
class Privacy(Protocol):
    """What a model may reveal of a single client."""

    def start(self, names: tuple[str, ...], seed: int) -> PrivacyState:
        """Begin a run of these clients."""

    def predict(self, work: PrivacyWork) -> tuple[float, int]:
        """Epsilon at the end of a run, and how many of its aggregations the budget allows.

        Raises:
            FederationError: it allows none.
        """
