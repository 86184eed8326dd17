"""FedCompass: steps follow computing power, so that groups of clients arrive together.

A client's seconds per step are measured with every update. A client whose update has arrived gets
as many steps as end when those of an existing group do, or opens a group of its own. A group is
aggregated when its last member has arrived, at the latest at its latest time; what comes later goes
into a general buffer, which the next group takes along.

Source: Li, Chaturvedi, He et al., FedCompass: Efficient Cross-Silo Federated Learning on
Heterogeneous Client Devices using a Computing Power Aware Scheduler, 2024, algorithms 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.protocols import (
    Action,
    AggregateUpdates,
    Assign,
    ClientInfo,
    FederateWork,
    FederationError,
    FederationInfo,
    LocalJob,
    SetTimer,
)
from shoal.fields.federate.schedule.staleness import StalenessWeight
from shoal.ir import Machine

# Share of a new measurement of seconds per step in the mean of all.
_NEWEST = 0.9
# Seconds of a step, at least: what takes no time has no speed.
_LEAST_S = 1e-9
# Of a number of steps; what rounding may take from a whole one.
_ROUNDING = 1e-9


@part
class FedCompass:
    """Groups of clients that arrive together.

    Args:
        q_max: most local steps of a job; 0 for those of the run's jobs.
        q_min: fewest; 0 for a fifth of ``q_max``.
        latest: a group waits until this many times the time that its first member needs.
        alpha: weight of an update without staleness.
        staleness: how the weight falls with the staleness of an update.
        normalise: weigh the updates of an aggregation as if each had come from their mean number
            of steps.
    """

    q_max: Annotated[int, Ge(0)] = 0
    q_min: Annotated[int, Ge(0)] = 0
    latest: Annotated[float, Ge(1)] = 1.2
    alpha: Annotated[float, Gt(0), Le(1)] = 0.9
    staleness: StalenessWeight = field(default_factory=StalenessWeight)
    normalise: bool = False

    needs_majority: ClassVar = False

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """With the paper's limits."""
        yield cls()

    def limits(self, steps: int) -> tuple[int, int]:
        """Fewest and most steps of a job, where the run's jobs have so many.

        Raises:
            FederationError: the fewest are more than the most.
        """
        most = self.q_max or steps
        fewest = self.q_min or max(1, most // 5)
        if fewest > most:
            raise FederationError(
                f"algorithm: q_min = {fewest} above q_max = {most}; give q_min <= q_max"
            )
        return fewest, most

    def start(self, info: FederationInfo) -> FedCompassScheduling:
        """Every client begins with most steps when it joins."""
        return FedCompassScheduling(self, info)


@dataclass(kw_only=True)
class ClientGroup:
    """Clients whose updates are expected together.

    Args:
        arrival: when they are expected, s.
        latest: when it is aggregated in any case, s.
        expected: members whose update has not arrived.
        arrived: those whose update has -> number of their job.
    """

    arrival: float
    latest: float
    expected: list[str] = field(default_factory=list)
    arrived: dict[str, int] = field(default_factory=dict)


class FedCompassScheduling:
    """Groups at work.

    Attributes:
        groups: that have members, by number.
        seconds: client -> seconds of a local step, transfers included.
    """

    def __init__(self, part: FedCompass, info: FederationInfo) -> None:
        self._part, self._info = part, info
        self._fewest, self._most = part.limits(info.steps)
        # An update's share of the model: the client's share of all examples.
        self._share = {client.name: client.samples / info.samples for client in info.clients}
        self.groups: dict[int, ClientGroup] = {}
        self.seconds: dict[str, float] = {}
        self._group_of: dict[str, int] = {}
        # Jobs whose updates have arrived and wait, and those of them that were late.
        self._held: dict[int, LocalJob] = {}
        self._general: list[int] = []
        self._version = self._opened = 0

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """Its speed is not known: most steps, in no group."""
        self.seconds.pop(client.name, None)
        return [Assign(client=client.name, steps=self._most)]

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """The first update of a client counts alone, later ones with their group."""
        measured = max((now - job.started) / job.steps, _LEAST_S)
        known = self.seconds.get(job.client)
        self.seconds[job.client] = (
            measured if known is None else (1 - _NEWEST) * known + _NEWEST * measured
        )
        self._held[job.number] = job
        number = self._group_of.pop(job.client, None)
        if number is None:
            return [self._aggregate([job.number]), *self._assign(job.client, now)]
        group = self.groups[number]
        group.expected.remove(job.client)
        if now <= group.latest:
            group.arrived[job.client] = job.number
            return [] if group.expected else self._end(number, now)
        if not group.expected:
            del self.groups[number]
        self._general.append(job.number)
        return self._assign(job.client, now)

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """Its group does not wait for it; what it has sent still counts."""
        number = self._group_of.pop(client, None)
        if number is None:
            # It may have arrived and be held: it gets no job when its group is aggregated.
            for group in self.groups.values():
                if client in group.arrived:
                    self._general.append(group.arrived.pop(client))
            return []
        group = self.groups[number]
        group.expected.remove(client)
        return [] if group.expected else self._end(number, now)

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """A group's latest time: it is aggregated with those that are there."""
        number = int(tag)
        return self._end(number, now) if number in self.groups else []

    def _end(self, number: int, now: float) -> list[Action]:
        """Aggregate a group and the late updates, and give those that have arrived new work."""
        group = self.groups[number]
        arrived, group.arrived = group.arrived, {}
        if not group.expected:
            del self.groups[number]
        numbers, self._general = [*self._general, *arrived.values()], []
        if not numbers:
            return []
        actions: list[Action] = [self._aggregate(numbers)]
        for client in sorted(arrived, key=lambda name: (self.seconds[name], name)):
            actions += self._assign(client, now)
        return actions

    def _aggregate(self, numbers: Sequence[int]) -> AggregateUpdates:
        jobs = [self._held.pop(number) for number in numbers]
        shares = [self._share[job.client] for job in jobs]
        part = self._part
        steps = sum(a * job.steps for a, job in zip(shares, jobs, strict=True)) / sum(shares)
        weights = {
            job.number: part.alpha
            * part.staleness(self._version - job.version)
            * share
            * (steps / job.steps if part.normalise else 1.0)
            for job, share in zip(jobs, shares, strict=True)
        }
        self._version += 1
        return AggregateUpdates(weights=weights)

    def _assign(self, client: str, now: float) -> list[Action]:
        """Join the group in which the client makes most steps, or open one."""
        seconds = self.seconds[client]
        best = 0
        for number, group in self.groups.items():
            steps = _whole((group.arrival - now) / seconds)
            if max(self._fewest, best + 1) <= steps <= self._most:
                best, chosen = steps, number
        if best:
            self.groups[chosen].expected.append(client)
            self._group_of[client] = chosen
            return [Assign(client=client, steps=best)]
        return self._open(client, seconds, now)

    def _open(self, client: str, seconds: float, now: float) -> list[Action]:
        """A new group, which ends about when the fastest of another comes for the next time."""
        fitting = []
        for group in self.groups.values():
            members = [*group.expected, *group.arrived]
            if now < group.latest and members:
                fastest = min(self.seconds[name] for name in members)
                steps = _whole((group.latest + fastest * self._most - now) / seconds)
                if steps <= self._most:
                    fitting.append(steps)
        steps = max(self._fewest, max(fitting)) if fitting else self._most
        self._opened += 1
        number, work = self._opened, steps * seconds
        group = ClientGroup(
            arrival=now + work, latest=now + self._part.latest * work, expected=[client]
        )
        self.groups[number] = group
        self._group_of[client] = number
        return [Assign(client=client, steps=steps), SetTimer(at=group.latest, tag=str(number))]

    def state(self) -> dict[str, Any]:
        """All it remembers."""
        return {
            "groups": [[number, asdict(group)] for number, group in self.groups.items()],
            "seconds": self.seconds,
            "group_of": self._group_of,
            "held": [asdict(job) for job in self._held.values()],
            "general": self._general,
            "version": self._version,
            "opened": self._opened,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.groups = {number: ClientGroup(**group) for number, group in state["groups"]}
        self.seconds, self._group_of = dict(state["seconds"]), dict(state["group_of"])
        self._held = {one["number"]: LocalJob(**one) for one in state["held"]}
        self._general = list(state["general"])
        self._version, self._opened = state["version"], state["opened"]


def _whole(steps: float) -> int:
    """Whole steps in a time."""
    return math.floor(steps + _ROUNDING * max(1.0, abs(steps)))
