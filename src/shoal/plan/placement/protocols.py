"""What a placer of experts promises: who owns an expert, and who has a copy of it for a step.

Shapes: E experts, N devices, D devices that tokens come from (the same N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import require

if TYPE_CHECKING:
    from shoal.ir import Estimate, Machine, Work

Again: TypeAlias = Literal["auto", "on", "off"]
"""Of all layers, of none, or of those in which it takes no time."""

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that share out the experts of a layer, neighbours by number on one node.

    Args:
        count: of devices.
        per_node: devices of a node; a divisor of ``count``.
    """

    count: int
    per_node: int

    def __post_init__(self) -> None:
        require(self.count >= 1, "devices", self.count, expected="1 or more")
        require(
            self.per_node >= 1 and self.count % self.per_node == 0,
            "devices of a node",
            self.per_node,
            expected=f"a divisor of {self.count}",
        )

    @property
    def nodes(self) -> Ints:
        """The node of every device."""
        return np.arange(self.count, dtype=np.int64) // self.per_node


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """What of a device's links is free while attention computes.

    Args:
        hidden_s: s that attention takes.
        near_s: s in which an expert goes to a device of its node.
        far_s: s in which it goes to another node.
    """

    hidden_s: float
    near_s: float
    far_s: float


class ExpertPlacer(Protocol):
    """Decides from expected loads alone; the routing of a step is unknown before its gate."""

    @property
    def every(self) -> int:
        """Steps between two choices of the owners; 0 for never."""

    @property
    def slots(self) -> int:
        """Copies that a device has room for, in every layer."""

    @property
    def rematerialize(self) -> Again:
        """Which layers' copies are dropped after the forward pass, and gathered again."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """What copies take of a step."""

    def owners(self, expected_E: Floats, devices: Devices, now_E: Ints | None = None) -> Ints:
        """The device [E] that keeps the state of each expert.

        Args:
            expected_E: tokens that each expert is expected to get.
            devices: all of them.
            now_E: who keeps it; None at the start, when nothing is known of loads.

        Raises:
            ConfigError: some device would own nothing.
        """

    def place(
        self, expected_E: Floats, owner_E: Ints, devices: Devices, budget: LinkBudget | None = None
    ) -> Flags:
        """Who has each expert [E, N] for a step; its owner always does.

        Args:
            expected_E: tokens that each expert is expected to get.
            owner_E: its owner.
            devices: all of them.
            budget: of every link, in each direction; None for as many copies as there is room for.
        """


class LoadForecast:
    """The loads that are expected of the next step: a moving average of those that were.

    Args:
        experts: how many, E.
        keep: weight of the previous estimate.
    """

    def __init__(self, experts: int, keep: float = 0.7) -> None:
        require(0 <= keep < 1, "history of loads", keep, expected="at least 0 and below 1")
        self.loads_E: Floats = np.ones(experts)
        self._keep, self._known = keep, False

    def see(self, loads_E: Ints | Floats) -> None:
        """A step routed so many tokens to each expert.

        Raises:
            ConfigError: it is of another number of experts.
        """
        require(
            loads_E.shape == self.loads_E.shape,
            "history of loads",
            f"{loads_E.shape[-1]} experts",
            expected=f"one load of each of {len(self.loads_E)} experts; begin a new history",
        )
        keep = self._keep if self._known else 0.0
        self.loads_E = keep * self.loads_E + (1 - keep) * loads_E
        self._known = True
