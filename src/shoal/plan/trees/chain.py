"""A chain: the best guess of every level, nothing beside it."""

from __future__ import annotations

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.common import tree_of

__all__ = ["ChainTree"]


@part
class ChainTree:
    """One path of best guesses.

    Args:
        depth: its length; 0 for all that the drafter looks ahead.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
    """

    depth: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.depth <= MAX_NODES, "tree.chain.depth", self.depth,
                expected=f"0 to {MAX_NODES}")  # fmt: skip

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        """See :class:`~shoal.ir.decoding.TreePart`."""
        depth = min(self.depth or calibration.levels, most)
        return tree_of("tree.chain", [(0,) * (n + 1) for n in range(depth)], calibration)
