"""One flow after the other to the path that is least loaded so far.

Source: Graham, Bounds on Multiprocessing Timing Anomalies, 1969 (list scheduling); Al-Fares et
al., Hedera: Dynamic Flow Scheduling for Data Center Networks, 2010 (global first fit).
"""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import FlowPaths, Flows
from shoal.plan.paths.common import pieces_of


@part
class GreedyPaths:
    """Least-loaded single paths, flow by flow in the order of hosts; no flow is split."""

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """The spine on which the busier of the two links is least busy, by bytes."""
        cut = pieces_of(flows, fabric)
        chosen = np.flatnonzero(cut.crossing)
        size = flows.size[cut.flow[chosen]]
        spine = least_loaded(cut.first[chosen], cut.last[chosen], size, cut.phase[chosen], fabric)
        return cut.paths(chosen, 1.0, spine, planner="greedy")


def least_loaded(
    first: np.ndarray,
    last: np.ndarray,
    size: np.ndarray,
    phase: np.ndarray,
    fabric: LeafSpine,
    up: np.ndarray | None = None,
    down: np.ndarray | None = None,
) -> np.ndarray:
    """Spine of each piece in the order given; every phase begins with idle links.

    Args:
        first: leaf that each leaves by, [P].
        last: leaf that it arrives at, [P].
        size: bytes of each, [P].
        phase: of each, ascending, [P].
        fabric: links that are down are never taken.
        up: seconds that uplinks are busy already, [L, S]; changed in place.
        down: the same of downlinks, [L, S].
    """
    rate = fabric.uplinks
    up_is = rate > 0
    cost = np.where(up_is, 1.0, 0.0) / np.where(up_is, rate, 1.0)
    barred = np.where(up_is, 0.0, np.inf)
    up = np.zeros_like(rate) if up is None else up
    down = np.zeros_like(rate) if down is None else down
    out = np.empty(len(first), np.int64)
    now = -1
    rows = zip(first.tolist(), last.tolist(), size.tolist(), phase.tolist(), strict=True)
    for index, (a, b, bytes_, at) in enumerate(rows):
        if at != now and now >= 0:
            up[:] = 0.0
            down[:] = 0.0
        now = at
        busy = np.maximum(up[a] + bytes_ * cost[a], down[b] + bytes_ * cost[b])
        best = int((busy + barred[a] + barred[b]).argmin())
        up[a, best] += bytes_ * cost[a, best]
        down[b, best] += bytes_ * cost[b, best]
        out[index] = best
    return out
