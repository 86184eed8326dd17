"""The server of a federation without its sockets: events and times in, jobs and models out.

It holds the model, the jobs that are out, the updates that wait, and does what the scheduler says.
The versions from which jobs started are kept as long as these jobs are out.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shoal.fields.federate.planes.direct import LocalSum
from shoal.fields.federate.planes.protocols import RunningPlane
from shoal.fields.federate.protocols import (
    Action,
    AggregateUpdates,
    Arrived,
    Assign,
    ClientInfo,
    DropUpdate,
    FederationError,
    FederationInfo,
    FoldUpdate,
    LocalJob,
    RobustRule,
    Scheduling,
    ServerState,
    SetTimer,
    Update,
    UpdateRefusedError,
)

# Updates of each client, one after the other, that are refused before a run is given up.
_IN_VAIN = 10

Note = Callable[..., None]
"""Writes an event: a kind, and fields."""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """What a coordinator works with.

    Args:
        scheduling: decides.
        rule: combines updates.
        step: moves the model.
        plane: has updates between their arrival and their aggregation.
    """

    scheduling: Scheduling
    rule: RobustRule
    step: ServerState
    plane: RunningPlane = field(default_factory=LocalSum)


class Coordinator:
    """The state of a federation.

    Args:
        info: the clients that are expected.
        machinery: what decides, combines and moves.
        model: to begin with, float32 [P]; it is not changed.
        note: writes events ``assign``, ``arrive``, ``aggregate``, ``leave``.

    Attributes:
        version: of the newest model.
        model: the newest, float32 [P]; a new array for each version.
        steps: local steps whose updates have been aggregated.
        jobs: number -> job that is out.
        staleness: versions by which the aggregated updates were late, one for each.
        arrived: updates that have arrived.
        refused: reason -> updates that were not taken.
        failed: why the run cannot go on; empty while it can.
    """

    def __init__(
        self, info: FederationInfo, machinery: Machinery, model: np.ndarray, note: Note
    ) -> None:
        self.info, self._machinery, self._note = info, machinery, note
        self.version, self.model, self.steps = 0, model, 0
        self.jobs: dict[int, LocalJob] = {}
        self.staleness: list[int] = []
        self.arrived = 0
        self.refused: dict[str, int] = {}
        self.failed = ""
        self._in_vain = 0
        self._of: dict[str, int] = {}
        self._there: set[str] = set()
        self._bases: dict[int, np.ndarray] = {}
        self._waiting: dict[int, tuple[LocalJob, Update]] = {}
        # Updates that the plane has added to its sum, and their weights.
        self._folded: dict[int, tuple[LocalJob, float]] = {}
        self._timers: list[tuple[float, int, str]] = []
        self._number = self._timer = 0
        self._known = {client.name: client for client in info.clients}
        self._now = 0.0

    # Events

    def join(self, name: str, now: float) -> list[LocalJob]:
        """A client is there.

        Returns:
            The jobs that begin now.

        Raises:
            FederationError: it is none of the federation, or the clock went backward.
        """
        if name not in self._known:
            raise FederationError(f"client {name!r}: not expected; clients are {self._names()}")
        gone = self.leave(name, now)
        self._there.add(name)
        return gone + self._do(self._machinery.scheduling.on_join(self._known[name], now), now)

    def introduce(self, name: str, samples: int) -> None:
        """A client says how many examples it has, which it may do before it joins."""
        if name in self._known and name not in self._there:
            self._known[name] = ClientInfo(name=name, samples=samples)

    def leave(self, name: str, now: float) -> list[LocalJob]:
        """A client is gone; an update of its job will not be taken.

        Raises:
            FederationError: the clock went backward.
        """
        begun = self._before(now)
        if name not in self._there:
            return begun
        self._there.discard(name)
        number = self._of.pop(name, None)
        if number is not None:
            self._end(number)
        self._note("leave", client=name, now=now)
        begun += self._do(self._machinery.scheduling.on_leave(name, now), now)
        # A timer may have given it a job a moment ago.
        return [job for job in begun if job.number in self.jobs]

    def update(self, update: Update, now: float) -> list[LocalJob]:
        """An update has arrived.

        Raises:
            UpdateRefusedError: it answers no job that is out, has another shape or numbers that are
                not finite; the client's job stays out.
            FederationError: the clock went backward.
        """
        job = self.check(update.client, update.number)
        self._machinery.plane.check(update, self.model.size)
        if not math.isfinite(update.loss):
            raise UpdateRefusedError(
                f"update {update.number} of {update.client}: its loss is not finite",
                reason="not finite",
            )
        begun = self._before(now)
        del self.jobs[job.number], self._of[job.client]
        self._waiting[job.number] = job, update
        self.arrived, self._in_vain = self.arrived + 1, 0
        self._note(
            "arrive", client=job.client, number=job.number, now=now, seconds=now - job.started,
            steps=job.steps, version=job.version, stale=self.version - job.version,
            loss=float(update.loss),
        )  # fmt: skip
        return begun + self._do(self._machinery.scheduling.on_update(job, now), now)

    def refuse(self, name: str, cause: UpdateRefusedError, now: float) -> list[LocalJob]:
        """An update was not taken: its client is gone until it joins again.

        So nobody waits for it. When all that comes is refused, the run cannot go on.
        """
        self.refused[cause.reason] = self.refused.get(cause.reason, 0) + 1
        self._in_vain += 1
        if self._in_vain >= _IN_VAIN * len(self._known):
            self.failed = f"the last {self._in_vain} updates were refused; the newest: {cause}"
        self._note("refuse", client=name, now=now, reason=cause.reason, text=str(cause))
        return self.leave(name, now)

    def check(self, client: str, number: int) -> LocalJob:
        """The job that an update answers.

        Raises:
            UpdateRefusedError: there is none such, or no more.
        """
        if client not in self._known:
            raise UpdateRefusedError(
                f"update {number}: client {client!r} is not expected", reason="unknown"
            )
        if self._of.get(client) != number:
            raise UpdateRefusedError(
                f"update {number} of {client}: answers no job of this client that is out (sent "
                "twice, or too late)",
                reason="replayed",
            )
        return self.jobs[number]

    @property
    def plane(self) -> RunningPlane:
        """Where updates are between their arrival and their aggregation."""
        return self._machinery.plane

    @property
    def summing(self) -> bool:
        """Whether the plane has a sum that is not complete."""
        return bool(self._folded)

    def next_timer(self) -> float | None:
        """When the next timer is due, s; None without timers."""
        return self._timers[0][0] if self._timers else None

    def due(self, now: float) -> list[LocalJob]:
        """Let the timers work whose time has come."""
        begun: list[LocalJob] = []
        while self._timers and self._timers[0][0] <= now:
            at, _, tag = heapq.heappop(self._timers)
            self._now = max(self._now, at)
            begun += self._do(self._machinery.scheduling.on_timer(tag, self._now), self._now)
        return begun

    def _before(self, now: float) -> list[LocalJob]:
        """Let the timers work whose time came before an event: so the order is that of the times.

        What comes at the very time of a timer comes before it.

        Raises:
            FederationError: the clock went backward.
        """
        if now < self._now:
            raise FederationError(
                f"clock: went backward, from {self._now:.6f} s to {now:.6f} s; times must not fall"
            )
        begun = self.due(math.nextafter(now, -math.inf))
        self._now = now
        return begun

    def base(self, job: LocalJob) -> np.ndarray:
        """The model from which a job starts, float32 [P]."""
        return self._bases[job.version]

    # Actions

    def _do(self, actions: Sequence[Action], now: float) -> list[LocalJob]:
        begun: list[LocalJob] = []
        for action in actions:
            if isinstance(action, Assign):
                begun.append(self._assign(action, now))
            elif isinstance(action, AggregateUpdates):
                self._aggregate(action, now)
            elif isinstance(action, FoldUpdate):
                self._fold(action)
            elif isinstance(action, SetTimer):
                self._timer += 1
                heapq.heappush(self._timers, (action.at, self._timer, action.tag))
            else:
                self._drop(action)
        return begun

    def _assign(self, action: Assign, now: float) -> LocalJob:
        self._number += 1
        job = LocalJob(
            number=self._number,
            client=action.client,
            version=self.version,
            steps=action.steps,
            started=now,
        )
        assert action.client not in self._of, f"{action.client} has a job"
        self.jobs[job.number] = job
        self._of[job.client] = job.number
        self._bases[self.version] = self.model
        self._note("assign", **asdict(job), now=now)
        return job

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What a plane has lost cannot be had again: the run is over."""
        try:
            yield
        except FederationError as cause:
            self.failed = str(cause)
            raise

    def _fold(self, action: FoldUpdate) -> None:
        """Add an update to the plane's sum, if the rule is one."""
        if self._machinery.rule.folds:
            job, update = self._waiting.pop(action.number)
            with self._failing():
                self._machinery.plane.fold(update, action.weight)
            self._folded[action.number] = job, action.weight

    def _aggregate(self, action: AggregateUpdates, now: float) -> None:
        weights = np.array(list(action.weights.values()), np.float64)
        report: Mapping[str, Any] = {}
        if self._folded:
            jobs, direction = self._total(action)
        else:
            arrived = self._arrived(action, weights)
            jobs, direction = list(arrived.jobs), self._machinery.rule.combine(arrived)
            report = arrived.report
        model = self.model.copy()
        self._machinery.step.apply(model, direction)
        stale = [self.version - job.version for job in jobs]
        self.model, self.version = model, self.version + 1
        self.steps += sum(job.steps for job in jobs)
        self.staleness += stale
        self._forget()
        self._note(
            "aggregate", version=self.version, now=now, steps=self.steps, stale=stale,
            clients=[job.client for job in jobs], numbers=[*action.weights],
            weights=weights.tolist(),
            **report,
        )  # fmt: skip

    def _arrived(self, action: AggregateUpdates, weights: np.ndarray) -> Arrived:
        taken = [self._waiting.pop(number) for number in action.weights]
        jobs = [job for job, _ in taken]
        deltas = [update.delta for _, update in taken]
        if action.mixed:
            deltas = [
                delta
                if job.version == self.version
                else self.model - self._bases[job.version] + delta
                for job, delta in zip(jobs, deltas, strict=True)
            ]
        return Arrived(deltas=deltas, weights=weights, jobs=jobs)

    def _total(self, action: AggregateUpdates) -> tuple[list[LocalJob], np.ndarray]:
        """What the plane has summed, in the scale of the action's weights."""
        assert not action.mixed and self._folded.keys() <= action.weights.keys()
        number, (_, folded) = next(iter(self._folded.items()))
        scale = action.weights[number] / folded
        jobs = []
        for number, weight in action.weights.items():
            if number not in self._folded:
                self._fold(FoldUpdate(number=number, weight=weight / scale))
            job, folded = self._folded[number]
            assert abs(folded * scale - weight) <= 1e-9 * weight, "weights of another proportion"
            jobs.append(job)
        self._folded = {}
        with self._failing():
            direction = self._machinery.plane.total()
        direction *= np.float32(scale)
        return jobs, direction

    def _drop(self, action: DropUpdate) -> None:
        _, update = self._waiting.pop(action.number)
        self._machinery.plane.drop(update)
        self._forget()

    def _end(self, number: int) -> None:
        del self.jobs[number]
        self._forget()

    def _forget(self) -> None:
        """Let go of versions that no job needs: those of jobs that are out or wait."""
        wanted = {job.version for job in self.jobs.values()}
        # An update that is folded needs its base no more.
        wanted |= {job.version for job, _ in self._waiting.values()}
        self._bases = {at: base for at, base in self._bases.items() if at in wanted}

    def _names(self) -> str:
        names = [*self._known]
        return ", ".join(names[:5]) + (f" ... {names[-1]}" if len(names) > 5 else "")

    # State

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """All of it: what JSON holds, and arrays by name; it stays as it is when this goes on."""
        facts = {
            "version": self.version,
            "steps": self.steps,
            "now": self._now,
            "arrived": self.arrived,
            "refused": {**self.refused},
            "staleness": [*self.staleness],
            "number": self._number,
            "there": sorted(self._there),
            "jobs": [asdict(job) for job in self.jobs.values()],
            "waiting": [asdict(job) for job, _ in self._waiting.values()],
            "folded": [[asdict(job), weight] for job, weight in self._folded.values()],
            "timers": sorted(self._timers),
            "timer": self._timer,
            "scheduling": copy.deepcopy(self._machinery.scheduling.state()),
        }
        partial = self._machinery.plane.partial()
        arrays = {
            "model": self.model,
            **({} if partial is None else {"partial": partial}),
            **{f"base.{at}": base for at, base in self._bases.items()},
            **{f"delta.{at}": update.delta for at, (_, update) in self._waiting.items()},
            # The step changes what it keeps in place.
            **{f"step.{name}": one.copy() for name, one in self._machinery.step.state().items()},
        }
        return facts, arrays

    def load(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from such a state; the jobs that were out still are."""
        self.version, self.steps = facts["version"], facts["steps"]
        self._now, self.arrived = facts["now"], facts["arrived"]
        self.refused = dict(facts["refused"])
        self.staleness = list(facts["staleness"])
        self._number, self._timer = facts["number"], facts["timer"]
        self._there = set(facts["there"])
        self.jobs = {one["number"]: LocalJob(**one) for one in facts["jobs"]}
        self._of = {job.client: job.number for job in self.jobs.values()}
        self._timers = [(at, count, tag) for at, count, tag in facts["timers"]]
        self.model = arrays["model"]
        self._bases = {
            int(name[5:]): one for name, one in arrays.items() if name.startswith("base.")
        }
        self._waiting = {
            one["number"]: (
                LocalJob(**one),
                Update(
                    number=one["number"],
                    client=one["client"],
                    delta=arrays[f"delta.{one['number']}"],
                ),
            )
            for one in facts["waiting"]
        }
        self._folded = {one["number"]: (LocalJob(**one), weight) for one, weight in facts["folded"]}
        if "partial" in arrays:
            self._machinery.plane.resume(arrays["partial"])
        self._machinery.scheduling.load(facts["scheduling"])
        self._machinery.step.load(
            {name[5:]: one for name, one in arrays.items() if name.startswith("step.")}
        )
