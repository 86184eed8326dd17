"""Equal-cost multi-path: a hash of the flow chooses its path, whatever the load.

Source: Hopps, Analysis of an Equal-Cost Multi-Path Algorithm, RFC 2992, 2000.
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import WITHIN, FlowPaths, Flows


@part
class ECMP:
    """Hash every connection to a random path, as switches do by default.

    With bonded ports, hashes also choose the sending port and the leaf to which a spine forwards,
    so a receiver's ports are not balanced.

    Args:
        connections: number of connections of a flow, each with an equal share and its own hash; 0
            is one for each bonded port.
    """

    connections: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.connections <= 1024,
            "path_planner.ecmp.connections",
            self.connections,
            expected="0 for one a port, to 1024",
        )

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """Hashed spines and ports; links that are down are left out, as routing does."""
        flows.check(fabric)
        many = self.connections or fabric.ports
        flow = np.repeat(np.arange(len(flows)), many)
        random = generator(seed, purpose="ecmp hashes")
        src_port = random.integers(0, fabric.ports, len(flow))
        dst_port = random.integers(0, fabric.ports, len(flow))
        first = fabric.leaf(flows.src[flow], src_port)
        last = fabric.leaf(flows.dst[flow], dst_port)
        crossing = (first != last) & ~flows.inside(fabric)[flow]
        spine = np.full(len(flow), WITHIN)
        rows = np.flatnonzero(crossing)
        draw = random.random(len(flow))[rows]
        if fabric.uniform:
            spine[rows] = (draw * fabric.spines).astype(np.int64)
        else:
            for begin in range(0, len(rows), 1 << 16):
                some = rows[begin : begin + (1 << 16)]
                up = np.minimum(fabric.uplinks[first[some]], fabric.uplinks[last[some]]) > 0
                turn = (draw[begin : begin + len(some)] * up.sum(1)).astype(np.int64)
                spine[some] = (up.cumsum(1) > turn[:, None]).argmax(1)
        return FlowPaths.of(
            flow, 1.0 / many, spine, src_port=src_port, dst_port=dst_port, planner="ecmp"
        )
