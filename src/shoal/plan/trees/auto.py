"""The tree of the best nodes: each time the most probable one whose parent is there already."""

from __future__ import annotations

import heapq
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.common import tree_of


@part
class AutoTree:
    """Nodes by the probability that they are accepted, from the drafter's own calibration.

    A node's value is the product of the acceptance rates along its path; the expected number of
    tokens is one plus the sum of the values. Values decrease along every path and with every rank,
    so greedy selection gives the best tree of every size.

    Args:
        nodes: largest number of nodes; how many of them a step verifies follows from the cost of
            rows.

    Source: Cai et al., Medusa, 2024, section 2.3.3 (sparse tree).
    """

    traits: ClassVar[frozenset[str]] = frozenset({"follows_guesses"})
    nodes: Annotated[int, Ge(1), Le(MAX_NODES)] = MAX_NODES

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        right = calibration.right
        # By falling value; of equal ones the shorter path, then the better guess.
        ready: list[tuple[float, tuple[int, ...]]] = [(-right[0][0], (0,))]
        paths: list[tuple[int, ...]] = []
        while ready and len(paths) < min(most, self.nodes):
            value, path = heapq.heappop(ready)
            if not value:
                break
            paths.append(path)
            level, rank = len(path) - 1, path[-1]
            above = value / right[level][rank]
            if rank + 1 < len(right[level]):
                heapq.heappush(ready, (above * right[level][rank + 1], (*path[:-1], rank + 1)))
            if level + 1 < len(right):
                heapq.heappush(ready, (value * right[level + 1][0], (*path, 0)))
        # Of guesses that were never right the best one is left: a tree that is never worth its row.
        return tree_of("tree.auto", paths or [(0,)], calibration)
