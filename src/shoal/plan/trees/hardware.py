"""The best tree, of as many rows as pay on this machine."""

from __future__ import annotations

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.auto import AutoTree

__all__ = ["Hardware"]


@part
class Hardware:
    """As ``auto``, in rows: an engine measures what they cost as it starts, and takes what pays.

    A drafter that asks as it verifies (``ppd``) has a tree of this for every state, and its
    prompt tokens are rows too.

    Args:
        rows: N, at most so many, the root included.

    Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.3.
    """

    rows: int = MAX_NODES + 1

    def __post_init__(self) -> None:
        require(2 <= self.rows <= MAX_NODES + 1, "tree.hardware.rows", self.rows,
                expected=f"2 to {MAX_NODES + 1}")  # fmt: skip

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        """See :class:`~shoal.ir.decoding.TreePart`."""
        return AutoTree().build(calibration, min(most, self.rows - 1))
