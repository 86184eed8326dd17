"""A tree that is written down: its paths, each a rank for every level."""

from __future__ import annotations

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.common import tree_of


@part
class PathTree:
    """Explicit nodes: ``[[0], [1], [0, 0]]`` verifies two first tokens and one second token.

    Args:
        paths: paths of the nodes, each after the path that it extends. Where few rows pay off, the
            first ones are verified.

    Source: Cai et al., Medusa, 2024, section 2.1.2.
    """

    paths: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 0), (0, 0, 0))

    def __post_init__(self) -> None:
        good = 1 <= len(self.paths) <= MAX_NODES and all(self.paths)
        require(good, "tree.paths.paths", len(self.paths),
                expected=f"1 to {MAX_NODES} paths, none of them empty")  # fmt: skip

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        return tree_of("tree.paths", self.paths, calibration).first(most)
