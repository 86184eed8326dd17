"""C4P: every connection of every job gets a path of its own, and weights follow what links give.

The controller knows all connections. Those of a port stay on that port's leaf at both ends, so
a receiver's bonded ports stay balanced; links that are down or too slow are left out; the rest
get connections until none has more than one above the mean. When a link degrades later, bytes
move between the connections of a flow by their measured rates.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.network.fabric import DegradedLink, LeafSpine
from shoal.cost.network.fair import max_min_rates
from shoal.cost.network.flows import FlowPaths, Flows
from shoal.plan.paths.common import pieces_of
from shoal.plan.paths.lp import rounded
from shoal.plan.paths.split import assign_phases


@part
class C4P:
    """Assign explicit paths to all jobs' connections; no link exceeds the mean by more than one.

    Args:
        connections: number of connections of a flow and port, each with its own path; load moves
            only among them.
        bad_below: links below this share of their bandwidth are not used if the leaf has better
            ones.
    """

    connections: Annotated[int, Ge(1), Le(1024)] = 1
    bad_below: Annotated[float, Ge(0.0), Le(1.0)] = 0.5

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """Deal connections evenly; around bad links, by the linear programme.

        Raises:
            PlanError: two leaves have no spine in common.
        """
        good, notes = without_bad_links(fabric, self.bad_below)
        if good.uniform:
            cut = pieces_of(flows, good)
            return assign_phases(cut, good, self.connections, "c4p", notes)
        return rounded(flows, good, self.connections, "c4p", notes)


def without_bad_links(fabric: LeafSpine, bad_below: float) -> tuple[LeafSpine, tuple[str, ...]]:
    """The fabric as the planner uses it, and what it left out."""
    best = fabric.uplinks.max()
    bad = fabric.uplinks < bad_below * best
    # A leaf keeps what it has when it has nothing good.
    bad &= (fabric.uplinks >= bad_below * best).any(axis=1, keepdims=True)
    if not bad.any():
        return fabric, ()
    left_out = [(int(a), int(s)) for a, s in np.argwhere(bad)]
    kept = tuple(pair for pair in fabric.health if (pair.leaf, pair.spine) not in left_out)
    out = tuple(DegradedLink(leaf=a, spine=s, share=0.0) for a, s in left_out)
    named = ", ".join(f"{a}-{s}" for a, s in left_out[:4]) + (" ..." if len(left_out) > 4 else "")
    note = f"left out {len(left_out)} pairs of links between leaf and spine: {named}"
    changed = fabric.model_dump() | {"health": [*kept, *out]}
    return LeafSpine.model_validate(changed), (note,)


def measured_rates(flows: Flows, paths: FlowPaths, fabric: LeafSpine) -> np.ndarray:
    """Byte/s of each connection while all are busy, [P]; infinite for those inside a node."""
    out = np.full(len(paths), np.inf)
    rows = np.flatnonzero(~flows.inside(fabric)[paths.flow])
    links, weights = paths.take(rows).links(flows, fabric)
    out[rows] = max_min_rates(links, fabric.capacity, weights)
    return out


def reweighted(paths: FlowPaths, rates: np.ndarray) -> FlowPaths:
    """The same paths with bytes split by measured rates, so that a flow's connections end together.

    Args:
        paths: with one or more connections a flow.
        rates: measured byte/s of each connection, [P]; size over completion time.

    Raises:
        PlanError: a rate is missing or not above zero.
    """
    require(
        len(rates) == len(paths) and bool((rates > 0).all()),
        "rates",
        f"{len(rates)}, the least {float(np.min(rates, initial=np.inf)):g}",
        expected=f"{len(paths)} above 0, one for each connection",
        error=PlanError,
    )
    finite = np.where(np.isfinite(rates), rates, 1.0)
    whole = np.bincount(paths.flow, finite)
    return replace(paths, share=finite / whole[paths.flow])
