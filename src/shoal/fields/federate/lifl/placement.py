"""Updates are dealt to as few hosts as hold them: best-fit bin packing.

Source: Qi et al., LIFL, 2024; the rule is that of Johnson et al., Worst-Case Performance Bounds for
Simple One-Dimensional Packing Algorithms, 1974.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import require
from shoal.fields.federate.protocols import FederationError

# Rounding of sums of demands.
_LEAST = 1e-9


class BestFitPlacement:
    """Hosts that fill up.

    Args:
        capacities: of each host, in updates that it can aggregate in a round, MC_i.

    Raises:
        FederationError: one is not above 0.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        for at, one in enumerate(capacities):
            require(
                one > 0 and math.isfinite(one),
                f"capacity of host {at}",
                one,
                expected="a number above 0",
                error=FederationError,
            )
        require(bool(capacities), "hosts", 0, expected="one at least", error=FederationError)
        self._capacities = list(map(float, capacities))
        self.loads = [0.0] * len(capacities)

    def place(self, demand: float = 1.0) -> int:
        """The host on which the least room is left, of those that have enough.

        Where none has, it is the one with the most room: updates then wait there.
        """
        room = [cap - load for cap, load in zip(self._capacities, self.loads, strict=True)]
        fits = [at for at, one in enumerate(room) if one >= demand - _LEAST]
        if fits:
            # A host that has work is filled before another one begins.
            host = min(fits, key=lambda at: (self.loads[at] == 0, room[at], at))
        else:
            host = max(range(len(room)), key=lambda at: (room[at], -at))
        self.loads[host] += demand
        return host

    def clear(self) -> None:
        """All hosts are empty."""
        self.loads = [0.0] * len(self.loads)


def pack(demands: Sequence[float], capacities: Sequence[float]) -> list[int]:
    """The host of each demand, the largest placed first."""
    hosts, places = BestFitPlacement(capacities), [0] * len(demands)
    for at in sorted(range(len(demands)), key=lambda at: -demands[at]):
        places[at] = hosts.place(demands[at])
    return places
