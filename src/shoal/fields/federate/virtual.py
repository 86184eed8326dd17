"""A federation on a virtual clock: time is computed, learning is real or left out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shoal.core.random import generator
from shoal.fields.federate.coordinator import Coordinator
from shoal.fields.federate.protocols import LocalJob, Update, UpdateRefusedError


class Working(Protocol):
    """Work that has begun, or begins when its result is wanted."""

    def begin(self) -> None:
        """Begin elsewhere, if it is done elsewhere; called for those that are due first."""

    def result(self) -> tuple[np.ndarray, float]:
        """A delta float32 [P], and a loss."""


Fit = Callable[[LocalJob, np.ndarray], Working]
"""Begins the work of a job from a model."""


@dataclass(frozen=True, kw_only=True)
class ClientTimes:
    """How long things take on the virtual clock.

    Args:
        step_s: client -> seconds of a local step.
        up_s: client -> seconds of an update on its way.
        down_s: client -> seconds of a model on its way.
        merge_s: seconds of the server for each update.
        jitter: relative deviation of a job's computing time, drawn for each job.
        seed: of these draws.
    """

    step_s: Mapping[str, float]
    up_s: Mapping[str, float]
    down_s: Mapping[str, float]
    merge_s: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def seconds(self, job: LocalJob) -> float:
        """From the assignment of a job to the arrival of its update."""
        work = self.step_s[job.client] * job.steps
        if self.jitter:
            draw = generator(self.seed, purpose="jitter of jobs", step=job.number)
            work *= max(0.1, 1 + self.jitter * float(draw.standard_normal()))
        return self.down_s[job.client] + work + self.up_s[job.client] + self.merge_s


@dataclass
class VirtualClock:
    """Drives a coordinator.

    Args:
        coordinator: of the federation.
        times: how long jobs take.
        fit: does their work; its result is awaited when the update is due.
        ahead: works of those that are due first which may have begun: as many updates are held.
        now: s.
    """

    coordinator: Coordinator
    times: ClientTimes
    fit: Fit
    ahead: int = 0
    now: float = 0.0
    _due: list[tuple[float, int]] = field(default_factory=list)
    _work: dict[int, Working] = field(default_factory=dict)

    def begin(self) -> None:
        """All clients join."""
        for client in self.coordinator.info.clients:
            self.join(client.name)

    def join(self, name: str) -> None:
        """A client is there, or there again, now."""
        self._send(self.coordinator.join(name, self.now))

    def leave(self, name: str) -> None:
        """A client is gone now, with its work."""
        self._send(self.coordinator.leave(name, self.now))

    def step(self) -> bool:
        """The next update or timer; false if nothing is on its way."""
        timer = self.coordinator.next_timer()
        arrival = self._due[0][0] if self._due else None
        if timer is None and arrival is None:
            return False
        if arrival is None or (timer is not None and timer < arrival):
            assert timer is not None
            self.now = timer
            self._send(self.coordinator.due(self.now))
            return True
        if self.ahead:
            for _, number in heapq.nsmallest(self.ahead, self._due):
                self._work[number].begin()
        self.now, number = heapq.heappop(self._due)
        work = self._work.pop(number)
        job = self.coordinator.jobs.get(number)
        if job is None:  # its client has left
            return True
        delta, loss = work.result()
        update = Update(number=number, client=job.client, delta=delta, loss=loss)
        try:
            self._send(self.coordinator.update(update, self.now))
        except UpdateRefusedError as cause:
            self._send(self.coordinator.refuse(job.client, cause, self.now))
            self.join(job.client)
        return True

    def _send(self, jobs: list[LocalJob]) -> None:
        for job in jobs:
            self._work[job.number] = self.fit(job, self.coordinator.base(job))
            heapq.heappush(self._due, (self.now + self.times.seconds(job), job.number))

    def state(self) -> dict[str, Any]:
        """What is on its way, as JSON."""
        due = [one for one in self._due if one[1] in self.coordinator.jobs]
        return {"now": self.now, "due": sorted(due)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on, with the work of jobs that were out begun anew; it gives the same."""
        self.now = state["now"]
        self._due = [(at, number) for at, number in state["due"]]
        for _, number in self._due:
            job = self.coordinator.jobs[number]
            self._work[number] = self.fit(job, self.coordinator.base(job))


@dataclass(frozen=True)
class Lazily:
    """Work that is done when its update is due, in the order of arrivals.

    So the state of what updates pass through is, at any event, that of the updates that have
    arrived, and work that was out is done again after a resume with the same result.

    Args:
        work: does it.
    """

    work: Callable[[], tuple[np.ndarray, float]]

    def begin(self) -> None:
        """Not before its result is wanted."""

    def result(self) -> tuple[np.ndarray, float]:
        """Do it."""
        return self.work()
