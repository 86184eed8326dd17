"""Experts move: now and then their owners are chosen anew, for what was popular of late.

What copies are compared with in replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.errors import require
from shoal.plan.placement.owners import even_owners, in_order, only_owners
from shoal.plan.placement.protocols import Again, Devices, Flags, Floats, Ints, LinkBudget


@dataclass(frozen=True)
class RearrangedPlacement:
    """One owner an expert; an expert that moves takes its optimizer state along.

    Args:
        every: steps between moves.

    Source: He et al., FasterMoE, 2022; Nie et al., FlexMoE, 2023.
    """

    every: int = 50

    slots: ClassVar[int] = 0
    rematerialize: ClassVar[Again] = "off"

    def __post_init__(self) -> None:
        require(self.every >= 1, "rearranged.every", self.every, expected="1 or more")

    def owners(self, expected_E: Floats, devices: Devices, now_E: Ints | None = None) -> Ints:
        """See :class:`~shoal.plan.placement.protocols.ExpertPlacer`."""
        if now_E is None:
            return in_order(len(expected_E), devices)
        new_E = even_owners(expected_E, devices)
        # The most popular first is near the best, and where it is not, nothing moves.
        before, after = (
            np.bincount(owner_E, expected_E, devices.count).max() for owner_E in (now_E, new_E)
        )
        return new_E if after < before else now_E

    def place(
        self, expected_E: Floats, owner_E: Ints, devices: Devices, budget: LinkBudget | None = None
    ) -> Flags:
        """See :class:`~shoal.plan.placement.protocols.ExpertPlacer`."""
        return only_owners(owner_E, devices)
