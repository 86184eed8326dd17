"""Ideal packet spraying: every flow takes every path at once, packet by packet.

Source: Dixit et al., On the Impact of Packet Spraying in Data Center Networks, 2013.
"""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import SPRAYED, FlowPaths, Flows
from shoal.plan.paths.common import pieces_of


@part
class Spray:
    """Spread packets over all paths in proportion to their bandwidth, without ordering."""

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """All spines for every flow that leaves its leaf."""
        cut = pieces_of(flows, fabric)
        crossing = np.flatnonzero(cut.crossing)
        spine = np.full(len(crossing), SPRAYED)
        return cut.paths(crossing, 1.0, spine, planner="spray")
