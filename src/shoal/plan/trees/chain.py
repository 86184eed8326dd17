"""A chain: the best guess of every level, nothing beside it."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.common import tree_of


@part
class ChainTree:
    """A single path of the best candidates.

    Args:
        depth: length of the chain; 0 for the drafter's depth.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
    """

    depth: Annotated[int, Ge(0), Le(MAX_NODES)] = 0

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        depth = min(self.depth or calibration.levels, most)
        return tree_of("tree.chain", [(0,) * (n + 1) for n in range(depth)], calibration)
