"""The full product: every guess of a level below every guess of the level above."""

from __future__ import annotations

from itertools import product

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.common import tree_of


@part
class Cartesian:
    """All combinations of the best candidates of each level.

    Args:
        widths: candidates of each level, from the root; the tree has ``w1 + w1 w2 + w1 w2 w3 +
            ...`` nodes.

    Source: Cai et al., Medusa, 2024, section 2.1.2.
    """

    widths: tuple[int, ...] = (3, 2, 1)

    def __post_init__(self) -> None:
        good = bool(self.widths) and all(width >= 1 for width in self.widths)
        require(good, "tree.cartesian.widths", list(self.widths), expected="one or more, each >= 1")
        nodes, level = 0, 1
        for width in self.widths:
            level *= width
            nodes += level
        require(nodes <= MAX_NODES, "tree.cartesian.widths", list(self.widths),
                expected=f"a tree of at most {MAX_NODES} nodes; this one has {nodes}")  # fmt: skip

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        paths = [
            path
            for depth in range(1, len(self.widths) + 1)
            for path in product(*map(range, self.widths[:depth]))
        ]
        return tree_of("tree.cartesian", paths, calibration).first(most)
