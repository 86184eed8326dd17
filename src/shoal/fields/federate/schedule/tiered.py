"""Tiers: every round has clients of about the same speed, so that the fast need not wait.

Source: Chai et al., TiFL: A Tier-based Federated Learning System, 2020; tiers are chosen in
proportion to their clients, and measured anew with every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.protocols import Action, FederateWork, FederationInfo, LocalJob
from shoal.fields.federate.schedule.fedavg import FedAvg, FedAvgScheduling
from shoal.ir import Machine


@part
class Tiered:
    """Rounds within tiers of equal speed.

    Args:
        tiers: how many; the first round has all clients, and measures them.
        fraction: of a tier's clients that work in a round, chosen at random.
    """

    tiers: Annotated[int, Ge(1)] = 2
    fraction: Annotated[float, Gt(0), Le(1)] = 1.0

    needs_majority: ClassVar = False

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """Up to five tiers, as in the paper, of two clients or more."""
        yield cls(tiers=max(1, min(5, len(work.info.clients) // 2)))

    def start(self, info: FederationInfo) -> TieredScheduling:
        """The first round begins when all clients are there."""
        return TieredScheduling(self, info)


class TieredScheduling(FedAvgScheduling):
    """Rounds whose clients are of one tier."""

    def __init__(self, part: Tiered, info: FederationInfo) -> None:
        super().__init__(FedAvg(fraction=part.fraction), info)
        self._tiers = part.tiers
        self._seconds: dict[str, float] = {}

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """Measure the client, then as in any round."""
        self._seconds[job.client] = (now - job.started) / job.steps
        return super().on_update(job, now)

    def _eligible(self, names: list[str], draw: np.random.Generator) -> list[str]:
        """All until their speeds are known; then those of a tier."""
        if any(name not in self._seconds for name in names):
            return names
        order = sorted(names, key=lambda name: (self._seconds[name], name))
        tiers = [some.tolist() for some in np.array_split(order, self._tiers) if len(some)]
        shares = np.array([len(some) for some in tiers], float)
        return sorted(tiers[int(draw.choice(len(tiers), p=shares / shares.sum()))])

    def state(self) -> dict[str, Any]:
        """All it remembers."""
        return {**super().state(), "seconds": self._seconds}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        super().load(state)
        self._seconds = dict(state["seconds"])
