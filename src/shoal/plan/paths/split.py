"""A few sub-flows on single paths, as good as ideal spraying.

Every flow is cut into as few pieces as make the busiest leaf's pieces divide evenly over the
spines, and the pieces are assigned to spines by an edge colouring: no uplink or downlink carries
more than ideal spraying would put on the busiest one.

Source: Addanki et al., Challenging the Need for Packet Spraying in Large-Scale Distributed
Training, 2024; König, 1916 (the colouring).
"""

from __future__ import annotations

import math

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import FlowPaths, Flows
from shoal.plan.paths.colouring import assign
from shoal.plan.paths.common import Pieces, pieces_of, regular_note


@part
class SplitPaths:
    """Minimal splitting and an edge colouring: the congestion of ideal spraying, on single paths.

    Args:
        pieces: number of pieces of a flow; 0 for the smallest number that reaches the maximum link
            load of spraying.
    """

    pieces: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.pieces <= 1024,
            "path_planner.split.pieces",
            self.pieces,
            expected="0 for the fewest, to 1024",
        )

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """Pieces of every flow, assigned to spines phase by phase.

        Raises:
            PlanError: links between leaves and spines are not alike.
        """
        require(
            fabric.uniform,
            "fabric",
            "unequal links between leaves and spines",
            expected="equal ones, which the colouring is about",
            hint="lp and c4p plan around slow links and links that are down",
            error=PlanError,
        )
        cut = pieces_of(flows, fabric)
        return assign_phases(cut, fabric, self.pieces, "split", regular_note(flows))


def assign_phases(
    cut: Pieces, fabric: LeafSpine, pieces: int, planner: str, notes: tuple[str, ...] = ()
) -> FlowPaths:
    """Deal crossing pieces to spines, phase by phase.

    Args:
        cut: pieces of flows.
        fabric: its links are alike.
        pieces: to cut each of them into; 0 for the fewest whose number divides over spines.
        planner: for the paths.
        notes: for the paths.
    """
    crossing = np.flatnonzero(cut.crossing)
    phase = cut.phase[crossing]
    borders = np.flatnonzero(np.diff(phase, prepend=-1))
    chosen, share, spine = [], [], []
    for begin, end in zip(borders, [*borders[1:], len(phase)], strict=True):
        rows = crossing[begin:end]
        result = _assign_one(cut.first[rows], cut.last[rows], fabric, pieces)
        chosen.append(rows[result[0]])
        share.append(result[1])
        spine.append(result[2])
    empty = np.zeros(0)
    return cut.paths(
        np.concatenate(chosen) if chosen else empty.astype(np.int64),
        np.concatenate(share) if share else empty,
        np.concatenate(spine) if spine else empty,
        planner=planner,
        notes=notes,
    )


def _assign_one(
    first: np.ndarray, last: np.ndarray, fabric: LeafSpine, pieces: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, share and spine of the parts of one phase's pieces."""
    L, n = fabric.leaves, fabric.spines
    pair = first * L + last
    count_LL = np.bincount(pair, minlength=L * L).reshape(L, L)
    most = int(max(count_LL.sum(0).max(), count_LL.sum(1).max()))
    k = pieces or n // math.gcd(most, n)
    assigned = assign(count_LL * k, n).reshape(n, L * L)
    # Rows sorted by pair meet colours sorted by pair. Pieces that meet on a spine stay
    # connections of their own: equal pieces at fair rates are what keeps the bound.
    row = np.argsort(pair, kind="stable")
    colour_pair, colour = np.nonzero(assigned.T)
    colours = np.repeat(colour, assigned.T[colour_pair, colour])
    return np.repeat(row, k), np.full(len(row) * k, 1.0 / k), colours
