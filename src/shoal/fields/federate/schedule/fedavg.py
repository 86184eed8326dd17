"""FedAvg: rounds; all that were chosen work from the same model, and the mean is the next one.

Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
2017; over-provisioned selection: Bonawitz et al., Towards Federated Learning at Scale, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.protocols import (
    Action,
    AggregateUpdates,
    Assign,
    ClientInfo,
    DropUpdate,
    FederateWork,
    FederationInfo,
    FoldUpdate,
    LocalJob,
    SetTimer,
)
from shoal.ir import Machine


@part
class FedAvg:
    """Synchronous rounds.

    Args:
        fraction: of the clients that work in a round, chosen at random.
        spare: share of more clients that are asked; a round ends with the first that suffice.
        deadline_s: after which a round ends with those that are there; 0 for none.
    """

    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    spare: Annotated[float, Ge(0)] = 0.0
    deadline_s: Annotated[float, Ge(0)] = 0.0

    needs_majority: ClassVar = True

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """All clients in every round."""
        yield cls()

    def drawn_from(self, updates: int) -> int:
        """With spare clients or a deadline the fastest are taken, which is no draw."""
        if self.spare or self.deadline_s:
            return updates
        return math.floor((updates - 1) / self.fraction + 1e-9) + 1

    def start(self, info: FederationInfo) -> FedAvgScheduling:
        """The first round begins when all clients are there."""
        return FedAvgScheduling(self, info)


class FedAvgScheduling:
    """Rounds at work."""

    def __init__(self, part: FedAvg, info: FederationInfo) -> None:
        self._part, self._info = part, info
        self._samples = {client.name: client.samples for client in info.clients}
        self._there: set[str] = set()
        self._round = self._wanted = 0
        # Clients that work for this round, and for one that ended without them.
        self._out: set[str] = set()
        self._late: set[str] = set()
        self._in: dict[int, str] = {}

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """The first round waits for all; later ones take the clients that are there."""
        self._there.add(client.name)
        self._samples[client.name] = client.samples
        if self._round == 0 and len(self._there) < len(self._info.clients):
            return []
        return [] if self._wanted else self._next(now)

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """Aggregate when enough are in."""
        if job.client in self._late:
            self._late.discard(job.client)
            return [DropUpdate(number=job.number), *([] if self._wanted else self._next(now))]
        self._out.discard(job.client)
        self._in[job.number] = job.client
        fold = FoldUpdate(number=job.number, weight=float(self._samples[job.client]))
        ends = len(self._in) >= self._wanted or not self._out
        return [fold, *(self._end(now) if ends else [])]

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """A round does not wait for who is gone."""
        for names in (self._there, self._late, self._out):
            names.discard(client)
        return self._end(now) if self._wanted and not self._out else []

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """The deadline of a round."""
        return self._end(now) if tag == f"round {self._round}" and self._in else []

    def _next(self, now: float) -> list[Action]:
        names = sorted(self._there - self._late)
        if not names:
            return []
        self._round += 1
        draw = generator(self._info.seed, purpose="clients of a round", step=self._round)
        names = self._eligible(names, draw)
        self._wanted = max(1, math.ceil(self._part.fraction * len(names) - 1e-9))
        asked = min(len(names), math.ceil(self._wanted * (1 + self._part.spare)))
        chosen = [names[at] for at in sorted(draw.permutation(len(names))[:asked])]
        self._out, self._in = set(chosen), {}
        limit = self._part.deadline_s
        timers: list[Action] = (
            [SetTimer(at=now + limit, tag=f"round {self._round}")] if limit else []
        )
        return [*(Assign(client=name, steps=self._info.steps) for name in chosen), *timers]

    def _eligible(self, names: list[str], draw: np.random.Generator) -> list[str]:
        """Of those that are there, the clients among which a round chooses."""
        return names

    def _end(self, now: float) -> list[Action]:
        """Aggregate those that are in, each by its examples; begin the next round."""
        total = sum(self._samples[name] for name in self._in.values())
        weights = {number: self._samples[name] / total for number, name in self._in.items()}
        self._wanted = 0
        self._late |= self._out
        actions: list[Action] = [AggregateUpdates(weights=weights)] if weights else []
        return actions + self._next(now)

    def state(self) -> dict[str, Any]:
        """All it remembers."""
        return {
            "there": sorted(self._there),
            "round": self._round,
            "wanted": self._wanted,
            "out": sorted(self._out),
            "late": sorted(self._late),
            "in": [*self._in.items()],  # in the order in which they are added up
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._there, self._out = set(state["there"]), set(state["out"])
        self._late = set(state["late"])
        self._round, self._wanted = state["round"], state["wanted"]
        self._in = {int(number): name for number, name in state["in"]}
