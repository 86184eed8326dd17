"""What a planner of paths promises."""

from __future__ import annotations

from typing import Protocol

from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import FlowPaths, Flows


class PathPlanner(Protocol):
    """A part of kind ``path_planner``."""

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """A path, or several with shares, for every flow of every phase.

        Every byte of a flow goes somewhere, and no path crosses a link that is down.

        Raises:
            PlanError: this planner cannot plan these flows on this fabric; says which can.
        """
