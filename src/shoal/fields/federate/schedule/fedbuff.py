"""FedBuff: clients work without pause, and every K updates make a version of the model.

Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
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
    FoldUpdate,
    LocalJob,
)
from shoal.fields.federate.schedule.staleness import StalenessWeight
from shoal.ir import Machine


@part
class FedBuff:
    """Buffered asynchronous aggregation.

    Args:
        size: number of updates per aggregation, K; the server's step is their mean.
        alpha: weight of an update without staleness.
        staleness: how the weight falls with the staleness of an update.
        by_samples: weigh the updates by their clients' examples, which the paper does not.
    """

    size: Annotated[int, Ge(1)] = 3
    alpha: Annotated[float, Gt(0), Le(1)] = 1.0
    staleness: StalenessWeight = field(default_factory=StalenessWeight)
    by_samples: bool = False

    needs_majority: ClassVar = False

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """With a buffer of half the clients, at most the paper's 10."""
        yield cls(size=max(1, min(10, len(work.info.clients) // 2)))

    def start(self, info: FederationInfo) -> FedBuffScheduling:
        """Every client begins when it joins."""
        return FedBuffScheduling(self, info)


class FedBuffScheduling:
    """A buffer at work."""

    def __init__(self, part: FedBuff, info: FederationInfo) -> None:
        if not info.clients:
            raise FederationError("algorithm: no clients; give at least one")
        self._part, self._info = part, info
        mean = info.samples / len(info.clients)
        self._share = {
            client.name: client.samples / mean if part.by_samples else 1.0
            for client in info.clients
        }
        self._buffer: list[LocalJob] = []
        self._version = 0

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """Work at once."""
        return [Assign(client=client.name, steps=self._info.steps)]

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """Into the buffer; the client goes on from the newest model."""
        self._buffer.append(job)
        again = Assign(client=job.client, steps=self._info.steps)
        # The version stays the same until the buffer is full, so the weight is known now.
        fold = FoldUpdate(number=job.number, weight=self._weight(job))
        if len(self._buffer) < self._part.size:
            return [fold, again]
        weights = {one.number: self._weight(one) / len(self._buffer) for one in self._buffer}
        self._buffer = []
        self._version += 1
        return [fold, AggregateUpdates(weights=weights), again]

    def _weight(self, job: LocalJob) -> float:
        late = self._part.staleness(self._version - job.version)
        return self._part.alpha * late * self._share[job.client]

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """Nobody waits for it."""
        return []

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """None is set."""
        return []

    def state(self) -> dict[str, Any]:
        """The buffer and the version."""
        return {"buffer": [asdict(job) for job in self._buffer], "version": self._version}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._buffer = [LocalJob(**one) for one in state["buffer"]]
        self._version = state["version"]
