"""Where updates are between their arrival and an aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from shoal.fields.federate.protocols import LocalJob, Update


class RunningPlane(Protocol):
    """An aggregation plane at work: where updates are between arrival and aggregation."""

    distributed: ClassVar[bool]
    """As that of the part."""

    def check(self, update: Update, size: int) -> None:
        """Hold an update against a model of so many parameters.

        Raises:
            UpdateRefusedError: it has another shape, or numbers that are not finite.
        """

    def fold(self, update: Update, weight: float) -> None:
        """Add it to the sum that is being made; it is not kept."""

    def total(self) -> np.ndarray:
        """The sum float32 [P] of what was folded; the next sum begins.

        Raises:
            FederationError: a process that sums is gone, and so are its numbers.
        """

    def drop(self, update: Update) -> None:
        """Forget an update that was not folded."""

    def partial(self) -> np.ndarray | None:
        """A copy of the sum so far, float32 [P]; None if it is empty."""

    def resume(self, partial: np.ndarray) -> None:
        """Go on from such a sum."""

    def address(self, job: LocalJob) -> str:
        """Where the update of a job goes: ``:PORT`` or ``:PORT/PATH``; empty for the server."""

    def facts(self) -> Mapping[str, float]:
        """What it has counted: ``up_bytes`` that did not come to the server, and others."""

    def close(self) -> None:
        """End its processes, and give its memory back."""


@dataclass(frozen=True, kw_only=True)
class PlaneWork:
    """What a plane is made for.

    Args:
        size: parameters of the model, P.
        keys: client -> key.
        job: of the run, as JSON; it says how updates are decoded.
        names: all clients, in their order.
        folds: the rule is a weighted sum, and needs no update for itself.
        arrived: called when an update has arrived elsewhere, in any thread; its result is the
            reason for which it is refused, or None, and comes in time.
    """

    size: int
    keys: Mapping[str, str]
    job: Mapping[str, Any]
    names: tuple[str, ...]
    folds: bool
    arrived: Callable[[Update], Future[str | None]]


@runtime_checkable
class AggregationPlane(Protocol):
    """Who receives the bodies of updates, and who sums them."""

    distributed: ClassVar[bool]
    """Whether it has processes of its own, which the virtual clock has not."""

    def start(self, work: PlaneWork) -> RunningPlane:
        """Begin, with processes where it has some.

        Raises:
            FederationError: the rule needs what is not kept, or a process does not start.
        """
