"""[53] Single path vs spraying: are a few pinned sub-flows as good as ideal packet spraying?

Source: Addanki et al., Challenging the Need for Packet Spraying in Large-Scale Distributed
Training, 2024.

Simulated random permutations of the hosts of thirty fabrics of 16 leaves: minimal splitting beside
ideal spraying and the linear programme; hashing; flows that begin 10 % apart. The A/A run puts
hashing in the place of splitting.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.cost.network.collectives import jittered
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import WITHIN, FlowPaths, Flows, lower_bound_s, worst_bytes
from shoal.cost.network.simulate import simulate
from shoal.plan.paths import PATH_PLANNERS
from shoal.plan.paths.lp import least_worst
from shoal.plan.paths.protocols import PathPlanner

FABRICS = tuple((h, n) for h in (4, 6, 8, 12, 16, 32) for n in (3, 4, 6, 8, 16))
"""Hosts of a leaf, and spines."""

_QUICK = ((4, 3), (6, 4), (8, 8), (12, 16), (16, 6))
_LEAVES = 16
_JITTER = 0.1
# Sizes and beginnings differ by these shares where the result is looked for to break.
_SWEEP = (0.0, 0.1, 0.25, 0.5, 1.0)


@part
class SinglePath(BaseClaim, row=53):
    """Random permutations over thirty leaf-spine fabrics, simulated at the level of flows.

    Args:
        permutations: permutations of all fabrics together.
    """

    permutations: Annotated[int, Ge(len(FABRICS)), Le(100_000)] = 1000

    def collect(self, run: ClaimRun) -> None:
        """Plan and simulate; every permutation is a phase, so that a fabric's go together."""
        fabrics = _QUICK if run.quick else FABRICS
        each = 4 if run.quick else -(-self.permutations // len(fabrics))
        seen = _Seen([], [], [], [], [])
        table = run.details["fabrics"] = []
        left = each * len(fabrics) if run.quick else self.permutations
        for index, (h, n) in enumerate(fabrics):
            run.progress(f"{h} hosts, {n} spines", index / len(fabrics))
            fabric = LeafSpine(leaves=_LEAVES, hosts=h, spines=n, latency_s=0.0)
            flows = _permutations(fabric, min(each, left), run.seed)
            left -= flows.num_phases
            table.append(_one(seen, flows, fabric, run.seed, run.as_baseline))
        run.details["greedy_congestion"] = max(seen.greedy)
        run.details["greedy_fails"] = statistics.fmean(value > 1.0 for value in seen.greedy)
        if not run.quick and not run.as_baseline:
            run.progress("where it breaks", 0.95)
            run.details["breaks"] = _breaks(run.seed)
        run.put("congestion", seen.congestion)
        run.put("over_least", seen.least)
        run.put("ecmp_time", seen.ecmp)
        run.put("jitter", seen.jitter)


@dataclass(frozen=True)
class _Seen:
    """Numbers of all permutations."""

    congestion: list[float]
    least: list[float]
    ecmp: list[float]
    jitter: list[float]
    greedy: list[float]


def _permutations(fabric: LeafSpine, count: int, seed: int) -> Flows:
    """Each host sends one flow and receives one, in each of so many phases."""
    hosts = fabric.num_hosts
    to = [
        generator(seed, purpose=f"permutation of {hosts}", step=fabric.spines, index=k).permutation(
            hosts
        )
        for k in range(count)
    ]
    src = np.tile(np.arange(hosts), count)
    return Flows.of(src, np.concatenate(to), 1e9, phase=np.repeat(np.arange(count), hosts))


def _planned(name: str, flows: Flows, fabric: LeafSpine, seed: int) -> FlowPaths:
    planner: PathPlanner = PATH_PLANNERS.build(name)
    return planner.paths(flows, fabric, seed=seed)


def _one(
    seen: _Seen, flows: Flows, fabric: LeafSpine, seed: int, as_baseline: bool
) -> dict[str, float]:
    """All permutations of one fabric."""
    method = _planned("ecmp" if as_baseline else "split", flows, fabric, seed + 1)
    hashed = _planned("ecmp", flows, fabric, seed)
    sprayed = worst_bytes(flows, _planned("spray", flows, fabric, seed), fabric)
    # Whole pieces of equal flows: rounding hides only the last bits of sums.
    ratio = np.round(worst_bytes(flows, method, fabric) / sprayed, 9)
    greedy = np.round(
        worst_bytes(flows, _planned("greedy", flows, fabric, seed), fabric) / sprayed, 9
    )
    first, _ = flows.of_phase(0)
    bytes_LL = np.zeros((fabric.leaves, fabric.leaves))
    a, b = fabric.leaf(first.src), fabric.leaf(first.dst)
    np.add.at(bytes_LL, (a[a != b], b[a != b]), first.size[a != b])
    least = least_worst(bytes_LL, fabric)[0] * fabric.uplinks[0, 0]
    worst = worst_bytes(flows, method, fabric)[0]
    method_s = simulate(flows, method, fabric).phase_s
    hashed_s = simulate(flows, hashed, fabric).phase_s
    bound = lower_bound_s(flows, fabric)
    # The worst case for the last flow, and every other at a moment of its own.
    some = flows.take(np.flatnonzero(flows.phase < max(1, 512 // fabric.num_hosts)))
    moved = jittered(some, bound, start=_JITTER, seed=seed)
    kept = method.take(np.flatnonzero(method.flow < len(some)))
    moved_s = simulate(moved, kept, fabric, resolution=1e-3).phase_s
    delay = moved_s / method_s[: len(moved_s)]
    seen.congestion.extend(ratio.tolist())
    seen.least.append(round(float(worst / least), 6))
    seen.ecmp.extend((hashed_s / method_s).tolist())
    seen.jitter.extend(delay.tolist())
    seen.greedy.extend(greedy.tolist())
    crossing = np.unique(method.flow[method.spine != WITHIN])
    pieces = int((method.spine != WITHIN).sum()) / max(1, len(crossing))
    return {
        "hosts": fabric.hosts,
        "spines": fabric.spines,
        "congestion": float(ratio.max()),
        "paths_a_flow": pieces,
        "ecmp_time": float((hashed_s / method_s).mean()),
        "over_bound": float((method_s / bound).max()),
        "jitter": float(delay.max()),
        "greedy_fails": float((greedy > 1.0).mean()),
    }


def _breaks(seed: int) -> list[dict[str, Any]]:
    """Seconds of splitting over those of spraying, while flows get less and less alike."""
    fabric = LeafSpine(leaves=_LEAVES, hosts=8, spines=8, latency_s=0.0)
    flows = _permutations(fabric, 4, seed)
    bound = lower_bound_s(flows, fabric)
    paths = {name: _planned(name, flows, fabric, seed) for name in ("ecmp", "split", "spray")}
    out = []
    for kind in ("start", "size"):
        for share in _SWEEP:
            start, size = (share, 0.0) if kind == "start" else (0.0, share)
            moved = jittered(flows, bound, start=start, size=size, seed=seed)
            took = {
                name: float(simulate(moved, found, fabric, resolution=1e-3).phase_s.mean())
                for name, found in paths.items()
            }
            out.append(
                {
                    "jitter_of": kind,
                    "share": share,
                    "split_over_spray": took["split"] / took["spray"],
                    "ecmp_over_spray": took["ecmp"] / took["spray"],
                }
            )
    return out
