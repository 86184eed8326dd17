"""What a way of saving promises.

A part of kind ``save_mode`` builds a :class:`Saver`, one on each rank, for the whole run. The loop
calls ``save`` with everything the rank holds, ``before_update`` before anything of it changes, and
asks for what has ``finished``; a save that fails is reported and does not end the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shoal.core.errors import CheckpointError, ShoalError

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.pieces import Given
    from shoal.checkpoint.store import Store
    from shoal.ir import Estimate, Machine, Work


SHARED = ("plan", "copy", "write")
"""Phases that every rank has; votes, commit and retain are rank 0's alone."""


class RankShare(NamedTuple):
    """What a rank did of a save.

    Args:
        phases_s: phase (plan, copy, write) -> seconds.
        spans_s: phase -> when it began and ended, s after the save began.
    """

    bytes: int
    phases_s: Mapping[str, float]
    spans_s: Mapping[str, tuple[float, float]]


class SaveTicket:
    """One save, under way or over.

    Attributes:
        blocked_s: cause -> seconds for which training waited: plan, watch, copy, write,
            before_update, back_pressure.
        phases_s: phase -> seconds in the background: write, commit, retain.
        spans_s: phase or cause -> when it first began and last ended, s after the save began.
        ranks: on rank 0: every rank's share.
        fresh_plan: the layout was new.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.blocked_s: dict[str, float] = {}
        self.phases_s: dict[str, float] = {}
        self.spans_s: dict[str, tuple[float, float]] = {}
        self.ranks: tuple[RankShare, ...] = ()
        self.bytes = 0
        self.fresh_plan = False
        self.error: ShoalError | None = None
        self.seconds = 0.0
        self._begin = time.perf_counter()
        self._over = threading.Event()

    def settle(self, error: ShoalError | None = None) -> None:
        """The save is over."""
        self.error = error
        self.seconds = time.perf_counter() - self._begin
        self._over.set()

    def timed(self, call: Callable[[], Any], *, phase: str) -> Any:
        """Call something in the background, and note how long it took."""
        begin = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - begin
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
            self._span(phase, seconds)

    def share(self) -> RankShare:
        """This rank's share so far: plan, copy, write."""
        blocked, behind = self.blocked_s, self.phases_s
        phases = {name: blocked.get(name, 0.0) + behind.get(name, 0.0) for name in SHARED}
        spans = {name: self.spans_s[name] for name in SHARED if name in self.spans_s}
        return RankShare(self.bytes, phases, spans)

    def blocked(self, cause: str, seconds: float) -> None:
        """Training waited until now."""
        self.blocked_s[cause] = self.blocked_s.get(cause, 0.0) + seconds
        self._span(cause, seconds)

    def _span(self, name: str, seconds: float) -> None:
        end = time.perf_counter() - self._begin
        first = self.spans_s.get(name, (end - seconds, end))[0]
        self.spans_s[name] = (first, end)

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is durable.

        Raises:
            CheckpointError: it failed, or is not over in time.
        """
        if not self._over.wait(timeout_s):
            raise CheckpointError(
                f"step {self.step}: not saved after {timeout_s:g} s; the place is slow or a rank "
                "is gone; wait longer"
            )
        if self.error is not None:
            raise self.error


class Saver(Protocol):
    """Saves the steps of a run, on one rank. All ranks make the same calls."""

    def save(self, step: int, pieces: Given, meta: Mapping[str, Any]) -> SaveTicket:
        """Save a step; when it returns, the ticket may still be under way.

        What is given must not change before the ticket is done, except behind
        :meth:`before_update`.

        Args:
            step: steps done.
            pieces: all that this rank holds, copies of what others hold included.
            meta: plain data to keep beside; rank 0's is kept.

        Raises:
            CheckpointError: what is given cannot be stored. A place that refuses is reported by the
                ticket.
        """

    def before_update(self, names: Collection[str] | None = None) -> None:
        """Return when tensors may change.

        Args:
            names: which; all if not given.
        """

    def finished(self) -> list[SaveTicket]:
        """Tickets that are over and were not returned before, oldest first."""

    def close(self, *, abandon: bool = False) -> None:
        """Wait for everything that is under way, and let go of the place.

        Args:
            abandon: do not wait; what is under way never becomes a checkpoint.
        """


class SaveMode(Protocol):
    """A part of kind ``save_mode``."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Seconds for which one save holds up training, and memory of the host."""

    def build(self, store: Store, peers: Peers, *, device: str = "cpu") -> Saver:
        """Start saving into a store.

        Raises:
            CheckpointError: another run is writing there, or the place refuses.
        """
