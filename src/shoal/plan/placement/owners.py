"""Every expert on its owner and nowhere else, as plain expert parallelism has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.plan.placement.estimates import copies
from shoal.plan.placement.protocols import Again, Devices, Flags, Floats, Ints, LinkBudget

if TYPE_CHECKING:
    from shoal.ir import Estimate, Machine, Work


@part
class Owners:
    """Experts in order, equally many on every device, in every step.

    Source: Lepikhin et al., GShard, 2020.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"experts_stay"})
    every: ClassVar[int] = 0
    slots: ClassVar[int] = 0
    rematerialize: ClassVar[Again] = "off"

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """No cost: the exchange of tokens is priced with the grid."""
        return copies(work, machine, 0)

    def owners(self, expected_E: Floats, devices: Devices, now_E: Ints | None = None) -> Ints:
        return in_order(len(expected_E), devices)

    def place(
        self, expected_E: Floats, owner_E: Ints, devices: Devices, budget: LinkBudget | None = None
    ) -> Flags:
        return only_owners(owner_E, devices)


def in_order(experts: int, devices: Devices) -> Ints:
    """Neighbouring experts on one device, the first of devices with one more where it must be.

    Raises:
        ConfigError: some device would own nothing.
    """
    _enough(experts, devices)
    return np.arange(experts, dtype=np.int64) * devices.count // experts


def even_owners(expected_E: Floats, devices: Devices) -> Ints:
    """As many experts on every device (one more on some), popular ones far from each other.

    The most popular first, each to the node and there to the device that is to do least and has
    room.

    Raises:
        ConfigError: some device would own nothing.
    """
    experts, count = len(expected_E), devices.count
    _enough(experts, devices)
    room_N = np.full(count, experts // count)
    over = experts % count
    load_N, node_N = np.zeros(count), devices.nodes
    owner_E = np.zeros(experts, dtype=np.int64)
    for expert in np.argsort(-expected_E, kind="stable"):
        free_N = room_N > 0 if room_N.any() else (room_N == 0) & (over > 0)
        of_node = np.bincount(node_N, weights=load_N)
        # No device owns one more than another before all rooms are taken.
        choices = np.flatnonzero(free_N)
        best = min(choices, key=lambda at: (load_N[at], of_node[node_N[at]], at))
        owner_E[expert] = best
        load_N[best] += expected_E[expert]
        room_N[best] -= 1
    return owner_E


def only_owners(owner_E: Ints, devices: Devices) -> Flags:
    """No device has a copy [E, N]."""
    return np.asarray(owner_E[:, None] == np.arange(devices.count)[None])


def _enough(experts: int, devices: Devices) -> None:
    require(
        experts >= devices.count,
        "devices",
        devices.count,
        expected=f"at most {experts}, or some own no expert; use fewer expert-parallel ranks",
    )
