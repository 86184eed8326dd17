"""What a recorded routing would have cost with another placement of experts.

A step is a row of layers, each forward and backward: copies are gathered while attention computes,
rows travel to experts, the busiest device computes, rows travel back. All devices wait for the
slowest in each of these.

Shapes: S steps, L layers, D = N devices, E experts.

Source: Hecate, 2025, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.errors import require
from shoal.plan.placement.fssdp import sender
from shoal.plan.placement.owners import only_owners
from shoal.plan.placement.protocols import (
    Devices,
    ExpertPlacer,
    Flags,
    Floats,
    Ints,
    LinkBudget,
    LoadForecast,
)
from shoal.plan.placement.routing import routed

# Of a forward pass, what a backward pass computes.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """What one layer of experts takes.

    Args:
        row_s: s in which a device computes the expert of one row, forward.
        attention_s: s of all else of a layer, forward.
        row_bytes: of a row that travels.
        expert_bytes: of the weights of an expert, as they travel.
        state_bytes: of its weights and its optimizer's state, as they move.
        near: byte/s of a device to others of its node.
        far: byte/s of a device to other nodes.
    """

    row_s: float
    attention_s: float
    row_bytes: float
    expert_bytes: float
    state_bytes: float
    near: float
    far: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require(getattr(self, name) > 0, f"costs.{name}", getattr(self, name), expected="> 0")

    @property
    def budget(self) -> LinkBudget:
        """Of links, while attention computes."""
        size = self.expert_bytes
        return LinkBudget(self.attention_s, size / self.near, size / self.far)

    def wire_s(self, bytes_NN: Floats, devices: Devices) -> float:
        """S until all devices have sent and received so many bytes [from, to]."""
        same = devices.nodes[:, None] == devices.nodes[None]
        travels = bytes_NN * ~np.eye(devices.count, dtype=bool)
        seconds = travels * same / self.near + travels * ~same / self.far
        return float(max(seconds.sum(0).max(), seconds.sum(1).max()))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """[S, L] rows of the busiest device over the mean, and [S] seconds of each step."""

    imbalance: Floats
    seconds: Floats


def replay(
    counts_SLDE: Ints, placer: ExpertPlacer, devices: Devices, costs: ExpertCosts
) -> ReplayResult:
    """Route a recorded trace again with a placer, which knows of each step only those before it.

    Args:
        counts_SLDE: rows of every device for every expert.
        placer: decides.
        devices: all of them.
        costs: of one layer.

    Raises:
        ConfigError: the trace is of other devices.
    """
    steps, layers, sources, experts = counts_SLDE.shape
    require(
        sources == devices.count,
        "trace",
        f"{sources} devices",
        expected=f"{devices.count}, as many as experts are placed on",
    )
    known = [LoadForecast(experts) for _ in range(layers)]
    owner_LE = np.stack([placer.owners(one.loads_E, devices) for one in known])
    imbalance, seconds = np.ones((steps, layers)), np.zeros(steps)
    for step in range(steps):
        if placer.every and step and step % placer.every == 0:
            for layer, one in enumerate(known):
                new_E = placer.owners(one.loads_E, devices, owner_LE[layer])
                carried = _carried(owner_LE[layer], new_E, devices) * costs.state_bytes
                seconds[step] += costs.wire_s(carried, devices)
                owner_LE[layer] = new_E
        for layer, one in enumerate(known):
            owner_E, counts_DE = owner_LE[layer], counts_SLDE[step, layer]
            held_EN = placer.place(one.loads_E, owner_E, devices, costs.budget)
            fetched = _fetched(owner_E, held_EN, devices) * costs.expert_bytes
            rows_DEN = routed(counts_DE, held_EN, devices)
            rows_N = rows_DEN.sum((0, 1))
            gather_s = costs.wire_s(fetched, devices)
            there_s = costs.wire_s(rows_DEN.sum(1) * costs.row_bytes, devices)
            forward = max(costs.attention_s, gather_s) + 2 * there_s + rows_N.max() * costs.row_s
            backward = (
                max(_BACKWARD * costs.attention_s, 2 * gather_s)  # copies again, and gradients back
                + 2 * there_s
                + _BACKWARD * rows_N.max() * costs.row_s
            )
            seconds[step] += forward + backward
            imbalance[step, layer] = rows_N.max() / max(1e-9, rows_N.mean())
            one.see(counts_DE.sum(0))
    return ReplayResult(imbalance, seconds)


def _carried(old_E: Ints, new_E: Ints, devices: Devices) -> Floats:
    """Experts that move [from, to]."""
    array = np.zeros((devices.count, devices.count))
    np.add.at(array, (old_E, new_E), 1.0)
    np.fill_diagonal(array, 0.0)
    return array


def _fetched(owner_E: Ints, held_EN: Flags, devices: Devices) -> Floats:
    """Copies that are sent [from, to]; a node gets each once, and hands it on."""
    array = np.zeros((devices.count, devices.count))
    have_EN = only_owners(owner_E, devices)
    for expert, device in zip(*np.nonzero(held_EN & ~have_EN), strict=True):
        source = sender(int(expert), int(device), owner_E, have_EN, devices)
        array[source, device] += 1.0
        have_EN[expert, device] = True
    return array
