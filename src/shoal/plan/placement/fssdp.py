"""Fully sharded sparse data parallelism: copies of popular experts for one step, where needed.

Nothing moves for good. Before a layer its popular experts are gathered on devices that are to do
little, as many as can be gathered while attention computes; afterwards the copies are dropped, and
their gradients are summed where the expert is owned.

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data
Parallelism, 2025.
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.plan.placement.owners import even_owners, in_order, only_owners
from shoal.plan.placement.protocols import Devices, Flags, Floats, Ints
from shoal.plan.placement.routing import balanced

__all__ = ["FSSDP", "sender"]


@part
class FSSDP:
    """Copies of popular experts until the busiest device has hardly more than the mean.

    Args:
        slots: copies that a device has room for, in every layer.
        slack: of the busiest device over the mean, at which no more copies are made.
        every: steps after which owners of popular experts are spread over nodes and devices
            again; 0 for never.
    """

    slots: int = 2
    slack: float = 0.05
    every: int = 100

    def __post_init__(self) -> None:
        require(self.slots >= 0, "placer.fssdp.slots", self.slots, expected="0 or more")
        require(self.slack >= 0, "placer.fssdp.slack", self.slack, expected="0 or more")
        require(self.every >= 0, "placer.fssdp.every", self.every, expected="0 or more")

    def owners(self, expected_E: Floats, devices: Devices) -> Ints:
        """See :class:`~shoal.plan.placement.protocols.ExpertPlacer`."""
        if (expected_E == expected_E[0]).all():  # nothing is known yet
            return in_order(len(expected_E), devices)
        return even_owners(expected_E, devices)

    def place(self, expected_E: Floats, owner_E: Ints, devices: Devices, gathers: int) -> Flags:
        """See :class:`~shoal.plan.placement.protocols.ExpertPlacer`."""
        held_EN = only_owners(owner_E, devices)
        most = (1 + self.slack) * expected_E.sum() / devices.count
        room_N = np.full(devices.count, min(self.slots, gathers))
        sends_N = np.full(devices.count, gathers)
        share_EN = balanced(expected_E, held_EN)
        while share_EN.sum(0).max() > most:
            found = self._copy(expected_E, owner_E, held_EN, share_EN, room_N, sends_N, devices)
            if found is None:
                break
            expert, device = found
            sends_N[sender(expert, device, owner_E, held_EN, devices)] -= 1
            room_N[device] -= 1
            held_EN[expert, device] = True
            share_EN = balanced(expected_E, held_EN, share_EN)
        return held_EN

    @staticmethod
    def _copy(
        expected_E: Floats,
        owner_E: Ints,
        held_EN: Flags,
        share_EN: Floats,
        room_N: Ints,
        sends_N: Ints,
        devices: Devices,
    ) -> tuple[int, int] | None:
        """The expert with the most tokens a copy, and the device that gets one more of it."""
        load_N, node_N = share_EN.sum(0), devices.nodes
        # Of no use to anybody else is what the busiest devices do not compute.
        busy_E = (share_EN[:, load_N >= load_N.max() * (1 - 1e-9)] > 0).any(1)
        each_E = np.where(busy_E, expected_E / held_EN.sum(1), -1.0)
        for expert in np.argsort(-each_E, kind="stable")[: int(busy_E.sum())]:
            nodes = set(node_N[held_EN[expert]].tolist())
            able = [
                at
                for at in np.flatnonzero((room_N > 0) & ~held_EN[expert])
                if load_N[at] < load_N.max() * (1 - 1e-9)
                and sends_N[sender(int(expert), int(at), owner_E, held_EN, devices)] > 0
            ]
            if able:
                best = min(able, key=lambda at: (int(node_N[at]) in nodes, load_N[at], at))
                return int(expert), int(best)
        return None


def sender(expert: int, device: int, owner_E: Ints, held_EN: Flags, devices: Devices) -> int:
    """Who sends a copy to ``device``: whoever of its node has one, or else the owner."""
    owner, node_N = int(owner_E[expert]), devices.nodes
    if node_N[owner] == node_N[device]:
        return owner
    near = np.flatnonzero(held_EN[expert] & (node_N == node_N[device]))
    return int(near[0]) if len(near) else owner
