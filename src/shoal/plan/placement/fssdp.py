"""Fully sharded sparse data parallelism: copies of popular experts for one step, where needed.

Before a layer its popular experts are gathered on devices that are to do little, as many as can be
gathered while attention computes; afterwards the copies are dropped, and their gradients are summed
where the expert is owned. Owners change seldom: popular experts are spread over nodes and devices,
so that no device has to send all of them.

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data
Parallelism, 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.plan.placement.estimates import both, copies, moves
from shoal.plan.placement.owners import even_owners, in_order, only_owners
from shoal.plan.placement.protocols import Again, Devices, Flags, Floats, Ints, LinkBudget
from shoal.plan.placement.routing import balanced

if TYPE_CHECKING:
    from shoal.ir import Estimate, Machine, Work


@part
class FSSDP:
    """Replicate popular experts until the load of the busiest device is near the mean.

    Args:
        slots: expert copies that a device holds, in every layer.
        slack: excess of the busiest device over the mean at which replication stops, as a share;
            also the smallest gain of the owner with the most to send for which owners change.
        rematerialize: drop copies after the forward pass and gather them again before the backward
            pass; auto for layers where computation hides the gathering.
        resharding_every: steps between two choices of the owners; None for never.
    """

    slots: Annotated[int, Ge(0)] = 2
    slack: Annotated[float, Ge(0)] = 0.05
    rematerialize: Again = "auto"
    resharding_every: int | None = 100

    def __post_init__(self) -> None:
        require(
            self.resharding_every is None or self.resharding_every >= 1,
            "placer.fssdp.resharding_every",
            self.resharding_every,
            expected="1 or more; null for owners that stay",
        )
        require(
            self.rematerialize in ("auto", "on", "off"),
            "placer.fssdp.rematerialize",
            self.rematerialize,
            expected="auto, on or off",
        )

    @property
    def every(self) -> int:
        return self.resharding_every or 0

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Of all slots, in every layer, and of experts that move."""
        borrowed = copies(work, machine, self.slots, self.rematerialize)
        return both(borrowed, moves(work, machine, self.every))

    def owners(self, expected_E: Floats, devices: Devices, now_E: Ints | None = None) -> Ints:
        if now_E is None:
            return in_order(len(expected_E), devices)
        new_E = even_owners(expected_E, devices)
        new, now = (np.bincount(one, weights=expected_E).max() for one in (new_E, now_E))
        return new_E if new * (1 + self.slack) < now else now_E

    def place(
        self, expected_E: Floats, owner_E: Ints, devices: Devices, budget: LinkBudget | None = None
    ) -> Flags:
        held_EN = only_owners(owner_E, devices)
        links = _Links(devices, budget)
        room_N = np.full(devices.count, self.slots)
        most = (1 + self.slack) * expected_E.sum() / devices.count
        share_EN = balanced(expected_E, held_EN)
        while share_EN.sum(0).max() > most:
            result = _copy(expected_E, owner_E, held_EN, share_EN, room_N, links)
            if result is None:
                break
            expert, device, source = result
            links.take(source, device)
            room_N[device] -= 1
            held_EN[expert, device] = True
            share_EN = balanced(expected_E, held_EN, share_EN)
        return held_EN


class _Links:
    """Seconds in which each device sends and receives copies."""

    def __init__(self, devices: Devices, budget: LinkBudget | None) -> None:
        self.devices = devices
        self._budget = budget or LinkBudget(1.0, 0.0, 0.0)
        self._sends_N, self._receives_N = np.zeros(devices.count), np.zeros(devices.count)

    def _takes(self, source: int, device: int) -> float:
        node_N = self.devices.nodes
        near = node_N[source] == node_N[device]
        return self._budget.near_s if near else self._budget.far_s

    def free(self, source: int, device: int) -> bool:
        """One more copy can travel while attention computes."""
        most = self._budget.hidden_s - self._takes(source, device)
        return bool(self._sends_N[source] <= most and self._receives_N[device] <= most)

    def take(self, source: int, device: int) -> None:
        """It does."""
        self._sends_N[source] += self._takes(source, device)
        self._receives_N[device] += self._takes(source, device)


def _copy(
    expected_E: Floats,
    owner_E: Ints,
    held_EN: Flags,
    share_EN: Floats,
    room_N: Ints,
    links: _Links,
) -> tuple[int, int, int] | None:
    """The expert with the most tokens a copy, the device that gets one more, and who sends it."""
    devices = links.devices
    load_N, node_N = share_EN.sum(0), devices.nodes
    busy_N = load_N >= load_N.max() * (1 - 1e-9)
    # Others' experts are of no use: the busiest devices do not compute them.
    busy_E = (share_EN[:, busy_N] > 0).any(1)
    each_E = np.where(busy_E, expected_E / held_EN.sum(1), -1.0)
    for expert in np.argsort(-each_E, kind="stable")[: int(busy_E.sum())].tolist():
        nodes = set(node_N[held_EN[expert]].tolist())
        able = []
        for device in np.flatnonzero((room_N > 0) & ~held_EN[expert] & ~busy_N).tolist():
            source = sender(expert, device, owner_E, held_EN, devices)
            if links.free(source, device):
                able.append((int(node_N[device]) in nodes, load_N[device], device, source))
        if able:
            _, _, device, source = min(able)
            return expert, device, source
    return None


def sender(expert: int, device: int, owner_E: Ints, held_EN: Flags, devices: Devices) -> int:
    """Who sends a copy to ``device``: a device of its node that has one, or else the owner."""
    owner, node_N = int(owner_E[expert]), devices.nodes
    if node_N[owner] == node_N[device]:
        return owner
    near = np.flatnonzero(held_EN[expert] & (node_N == node_N[device]))
    return int(near[0]) if len(near) else owner
