"""Flows over time: rates are fair at every moment, and change when a flow begins or ends.

Event-driven. Phases are independent, so many are advanced together, each with a clock of its
own; a thousand phases of a thousand flows take seconds.

Source: Massoulié and Roberts, Bandwidth Sharing: Objectives and Algorithms, 1999 (the fluid
model of flows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import require
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.fair import max_min_rates
from shoal.cost.network.flows import FlowPaths, Flows

# Rows that are advanced together: few enough for the processor's cache.
_ROWS = 1 << 16


@dataclass(frozen=True)
class NetworkOutcome:
    """When things ended.

    Args:
        flow_s: end of each flow, counted from the beginning of its phase, [F].
        phase_s: end of each phase, which is that of its last flow, latency included, [phases].
        events: moments at which rates changed, of all phases together.
    """

    flow_s: np.ndarray
    phase_s: np.ndarray
    events: int


def simulate(
    flows: Flows,
    paths: FlowPaths,
    fabric: LeafSpine,
    *,
    resolution: float = 0.0,
    progress: Callable[[float], None] = lambda share: None,
) -> NetworkOutcome:
    """Let flows pass over their paths.

    Args:
        flows: what is sent.
        paths: where it goes.
        fabric: over what.
        resolution: ends that lie closer together than this share of the time since the phase
            began change rates at once; 0 is exact.
        progress: called with the share of phases that are done.

    Raises:
        PlanError: paths do not fit the flows, or cross a link that is down.
    """
    require(0.0 <= resolution < 1.0, "resolution", resolution, expected="0 to below 1")
    flows.check(fabric)
    paths.check(flows, fabric)
    piece_s = np.zeros(len(paths))
    size = flows.size[paths.flow] * paths.share
    start = flows.start_s[paths.flow]
    phase = flows.phase[paths.flow]
    moving = np.flatnonzero((size > 0) & ~flows.inside(fabric)[paths.flow])
    piece_s[:] = start
    moving = moving[np.argsort(phase[moving], kind="stable")]
    events = 0
    # Whole phases, as many as fit.
    borders = np.flatnonzero(np.diff(phase[moving], prepend=-1))
    begin = 0
    while begin < len(moving):
        after = borders[borders > begin]
        fitting = after[after <= begin + _ROWS]
        if len(after) == 0 or len(moving) - begin <= _ROWS:
            end = len(moving)
        else:
            end = int(fitting[-1]) if len(fitting) else int(after[0])
        rows = moving[begin:end]
        links, weights = paths.take(rows).links(flows, fabric)
        own, group = np.unique(phase[rows], return_inverse=True)
        # Links of different phases are different links.
        keys = links + (group * (fabric.nothing + 1))[:, None]
        keys[links == fabric.nothing] = fabric.nothing
        numbers, compact = np.unique(keys, return_inverse=True)
        capacity = fabric.capacity[numbers % (fabric.nothing + 1)]
        ends, count = _advance(
            compact.reshape(links.shape),
            weights,
            capacity,
            size[rows],
            start[rows],
            group,
            len(own),
            resolution,
        )
        piece_s[rows] = ends
        events += count
        begin = end
        progress(begin / len(moving))
    flow_s = np.zeros(len(flows))
    np.maximum.at(flow_s, paths.flow, piece_s)
    phase_s = np.zeros(flows.num_phases)
    np.maximum.at(phase_s, flows.phase, flow_s)
    return NetworkOutcome(flow_s, phase_s + fabric.latency_s, events)


def _advance(
    links: np.ndarray,
    weights: np.ndarray | None,
    capacity: np.ndarray,
    size: np.ndarray,
    start: np.ndarray,
    group: np.ndarray,
    groups: int,
    resolution: float,
) -> tuple[np.ndarray, int]:
    """End of each piece, and the number of events; groups are independent of each other."""
    left = size.astype(np.float64)
    ends = np.zeros(len(size))
    now = np.full(groups, np.inf)
    np.minimum.at(now, group, start)
    alive = np.arange(len(size))
    events = 0
    while len(alive):
        clock = now[group[alive]]
        begun = start[alive] <= clock * (1 + 1e-12)
        running, waiting = alive[begun], alive[~begun]
        rate = max_min_rates(
            links[running], capacity, None if weights is None else weights[running]
        )
        need = left[running] / rate
        step = np.full(groups, np.inf)
        np.minimum.at(step, group[running], need)
        if resolution:
            known = np.isfinite(step)
            step[known] += resolution * (now[known] + step[known])
        np.minimum.at(step, group[waiting], start[waiting] - now[group[waiting]])
        mine = step[group[running]]
        done = need <= mine * (1 + 1e-9)
        ends[running[done]] = now[group[running[done]]] + need[done]
        left[running] = np.where(done, 0.0, left[running] - rate * mine)
        events += int(np.isfinite(step).sum())
        alive = np.sort(np.concatenate([running[~done], waiting]))
        # Where nothing runs, the clock jumps to the next beginning.
        now = np.where(np.isfinite(step), now + step, now)
        idle = np.full(groups, True)
        idle[group[running[~done]]] = False
        if len(waiting):
            first = np.full(groups, np.inf)
            np.minimum.at(first, group[waiting], start[waiting])
            now = np.where(idle & np.isfinite(first), np.maximum(now, first), now)
    return ends, events
