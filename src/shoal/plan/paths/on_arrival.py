"""Split when it arrives: no knowledge of what comes later, links as busy as they are now.

Source: Addanki et al., Challenging the Need for Packet Spraying in Large-Scale Distributed
Training, 2024 (splitting); Karp, Vazirani and Vazirani, 1990 (decisions without the future).
"""

from __future__ import annotations

import math

import numpy as np

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import FlowPaths, Flows
from shoal.plan.paths.common import pieces_of
from shoal.plan.paths.greedy import least_loaded


@part
class OnArrival:
    """Split each flow into few equal pieces, each on the least loaded path at its arrival.

    Flows arrive in the order of their start times; ties are in random order.
    """

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """Pieces of each flow in the order of arrival."""
        cut = pieces_of(flows, fabric)
        k = fabric.spines // math.gcd(fabric.hosts, fabric.spines)
        turn = generator(seed, purpose="arrival of flows").random(len(flows))
        rows = np.flatnonzero(cut.crossing)
        flow = cut.flow[rows]
        rows = rows[np.lexsort((turn[flow], flows.start_s[flow], cut.phase[rows]))]
        chosen = np.repeat(rows, k)
        size = flows.size[cut.flow[chosen]] * cut.share / k
        spine = least_loaded(cut.first[chosen], cut.last[chosen], size, cut.phase[chosen], fabric)
        return cut.paths(chosen, 1.0 / k, spine, planner="on_arrival")
