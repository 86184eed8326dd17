"""Planners of paths held against each other on one collective.

Source: Addanki et al., Challenging the Need for Packet Spraying in Large-Scale Distributed
Training, 2024 (congestion relative to ideal spraying).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.parts import Choice
from shoal.cost.network.collectives import CollectiveFlows, jittered
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import (
    SPRAYED,
    FlowPaths,
    Flows,
    link_bytes,
    lower_bound_s,
    worst_bytes,
)
from shoal.cost.network.simulate import simulate
from shoal.plan.paths import PATH_PLANNERS
from shoal.plan.paths.protocols import PathPlanner
from shoal.plan.paths.spray import Spray


@dataclass(frozen=True)
class PathPlannerResult:
    """What one planner reaches.

    Args:
        planner: its name, with options.
        seconds: of the whole collective, by the simulator.
        bound_s: that no choice of paths can beat.
        congestion: bytes on the busiest link over those of ideal spraying, in the worst phase.
        connections: pieces of a flow that leaves its leaf, on average.
        busiest: most connections on one link between leaf and spine in one phase; 0 where
            packets are sprayed.
        up: bytes on each uplink, of the whole collective, [L, S].
        down: bytes on each downlink, [L, S].
        notes: of the planner.
    """

    planner: str
    seconds: float
    bound_s: float
    congestion: float
    connections: float
    busiest: int
    up: np.ndarray
    down: np.ndarray
    notes: tuple[str, ...]


def plan_paths(
    policy: Choice | str, flows: Flows, fabric: LeafSpine, *, seed: int = 0
) -> FlowPaths:
    """Paths by the planner of that name, checked.

    Raises:
        PlanError: the planner cannot plan these flows here, or its paths break a rule.
    """
    planner: PathPlanner = PATH_PLANNERS.build(policy, where="policy")
    paths = planner.paths(flows, fabric, seed=seed)
    paths.check(flows, fabric)
    return paths


def busiest(flows: Flows, paths: FlowPaths, fabric: LeafSpine) -> int:
    """Most connections that share a link between leaf and spine in one phase."""
    pinned = np.flatnonzero(paths.spine >= 0)
    if not len(pinned):
        return 0
    some = paths.take(pinned)
    most = 0
    for leaf in some.ends(flows, fabric):
        link = flows.phase[some.flow] * fabric.leaves + leaf
        counts = np.unique(link * fabric.spines + some.spine, return_counts=True)[1]
        most = max(most, int(counts.max()))
    return most


def compare(
    job: CollectiveFlows,
    fabric: LeafSpine,
    policies: list[Choice | str],
    *,
    seed: int = 0,
    start: float = 0.0,
    size: float = 0.0,
    resolution: float = 0.0,
    progress: Callable[[str, float], None] = lambda text, share: None,
) -> list[PathPlannerResult]:
    """Plan and simulate a collective under each policy, with the same jitter for all.

    Args:
        job: the collective; planners see it in step and with equal sizes.
        fabric: over what.
        policies: planners by name.
        seed: of hashes and jitter.
        start: jitter of beginnings, as a share of what a phase takes at least.
        size: jitter of sizes, as a share of the size.
        resolution: of the simulator.
        progress: called with what is being done and the share that is done.

    Raises:
        PlanError: a planner cannot plan these flows here.
    """
    bound = lower_bound_s(job.flows, fabric)
    happened = jittered(job.flows, bound, start=start, size=size, seed=seed)
    sprayed = worst_bytes(job.flows, Spray().paths(job.flows, fabric), fabric)
    crossing = sprayed > 0
    weight = np.repeat(job.repeats, np.bincount(job.flows.phase, minlength=len(job.repeats)))
    whole = job.flows.sized(job.flows.size * weight)
    out = []
    for index, policy in enumerate(policies):
        progress(str(policy), index / len(policies))
        paths = plan_paths(policy, job.flows, fabric, seed=seed)
        worst = worst_bytes(job.flows, paths, fabric)
        up, down = link_bytes(whole, paths, fabric)
        pinned = paths.spine != -1
        leaving = len(np.unique(paths.flow[pinned]))
        result = simulate(happened, paths, fabric, resolution=resolution)
        spread = fabric.spines * int((paths.spine == SPRAYED).sum())
        pieces = int((paths.spine >= 0).sum()) + spread
        out.append(
            PathPlannerResult(
                planner=str(policy),
                seconds=job.seconds(result.phase_s),
                bound_s=job.seconds(bound),
                congestion=float((worst[crossing] / sprayed[crossing]).max(initial=0.0)),
                connections=pieces / leaving if leaving else 1.0,
                busiest=busiest(job.flows, paths, fabric),
                up=up,
                down=down,
                notes=paths.notes,
            )
        )
    return out
