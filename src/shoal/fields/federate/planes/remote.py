"""What planes share whose updates are summed in other processes."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np

from shoal.fields.federate.planes.channels import Channels
from shoal.fields.federate.planes.direct import verdict_of
from shoal.fields.federate.planes.protocols import PlaneWork
from shoal.fields.federate.protocols import FederationError, Update, UpdateRefusedError

SUM_S = 600.0
"""Seconds in which a sum must have come."""


class RemoteSums(ABC):
    """Processes that receive and sum updates, and tell the server of each.

    Args:
        work: what the plane is for.
        name: of the plane.

    Raises:
        FederationError: the rule is no sum.
    """

    distributed: ClassVar = True

    def __init__(self, work: PlaneWork, name: str) -> None:
        if not work.folds:
            raise FederationError(
                f"plane: {name} sums updates where they arrive, and this rule needs each of them; "
                "choose robust: mean, or plane: direct"
            )
        self._work, self._name = work, name
        self._sums: queue.SimpleQueue[tuple[int, Mapping[str, Any]] | FederationError] = (
            queue.SimpleQueue()
        )
        self._processes = Channels(work.job["listen"], self._heard)

    @abstractmethod
    def _place(self, at: int, **words: Any) -> Any:
        """Where an update is of which a process has said so."""

    # Messages of processes, in a thread of their own

    def _heard(self, at: int, kind: str, words: dict[str, Any]) -> None:
        if kind == "arrived":
            self._arrived(at, **words)
        elif kind == "total":
            self._sums.put((at, words))
        elif kind == "failed":
            self._sums.put(FederationError(f"plane: {words['reason']}"))
        else:
            self._sums.put(self._processes.gone(at))

    def _arrived(
        self, at: int, client: str, number: int, loss: float, wrong: list[str], **place: Any
    ) -> None:
        delta = UpdateRefusedError(*wrong) if wrong else self._place(at, **place)
        update = Update(number=number, client=client, delta=delta, loss=loss)

        def answer(verdict: Future[str | None]) -> None:
            with contextlib.suppress(FederationError):
                refused = verdict_of(verdict)
                self._processes.say(at, "verdict", number=number, refused=refused, **place)

        self._work.arrived(update).add_done_callback(answer)

    # The coordinator's

    def check(self, update: Update, size: int) -> None:
        """Its process has done it, and what was wrong stands in the place of the numbers."""
        if isinstance(update.delta, UpdateRefusedError):
            raise update.delta

    def next_sum(self) -> tuple[int, Mapping[str, Any]]:
        """The number of a process that has summed all that it had, and its words.

        Raises:
            FederationError: one has ended, or could not send its sum.
        """
        try:
            said = self._sums.get(timeout=SUM_S)
        except queue.Empty:
            raise FederationError(f"plane: no sum within {SUM_S:g} s") from None
        if isinstance(said, FederationError):
            raise said
        return said

    def resume(self, partial: np.ndarray) -> None:
        """Never: a partial sum is not saved."""
        raise FederationError(f"plane: {self._name} cannot go on from a sum; choose plane: direct")

    def facts(self) -> Mapping[str, float]:
        """Counters of all processes, added."""
        return self._processes.facts()

    def close(self) -> None:
        """End all processes."""
        self._processes.close()
