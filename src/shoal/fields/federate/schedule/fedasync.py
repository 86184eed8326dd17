"""FedAsync: every update is mixed into the model as it arrives, less the later it is.

Source: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.protocols import (
    Action,
    AggregateUpdates,
    Assign,
    ClientInfo,
    FederateWork,
    FederationInfo,
    LocalJob,
)
from shoal.fields.federate.schedule.staleness import StalenessWeight
from shoal.ir import Machine


@part
class FedAsync:
    """Asynchronous mixing.

    Args:
        alpha: weight of an update without staleness.
        staleness: how the weight falls with the staleness of an update.
    """

    alpha: Annotated[float, Gt(0), Le(1)] = 0.6
    staleness: StalenessWeight = field(default_factory=StalenessWeight)

    needs_majority: ClassVar = False

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """With the paper's weights."""
        yield cls()

    def start(self, info: FederationInfo) -> FedAsyncScheduling:
        """Every client begins when it joins."""
        return FedAsyncScheduling(self, info)


class FedAsyncScheduling:
    """Mixing at work."""

    def __init__(self, part: FedAsync, info: FederationInfo) -> None:
        self._part, self._info = part, info
        self._version = 0

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """Work at once."""
        return [Assign(client=client.name, steps=self._info.steps)]

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """Mix it, and give the client the result."""
        weight = self._part.alpha * self._part.staleness(self._version - job.version)
        self._version += 1
        return [
            AggregateUpdates(weights={job.number: weight}, mixed=True),
            Assign(client=job.client, steps=self._info.steps),
        ]

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """Nobody waits for it."""
        return []

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """None is set."""
        return []

    def state(self) -> dict[str, Any]:
        """The version."""
        return {"version": self._version}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._version = state["version"]
