"""The best tree, of as many rows as pay on this machine."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import MAX_NODES, DrafterCalibration, TreeSpec
from shoal.plan.trees.auto import AutoTree


@part
class Hardware:
    """As ``auto``, with a limit of rows: the engine measures their cost when it starts.

    A drafter whose prompt tokens are in the verified step (``ppd``) has one tree per state, and its
    prompt tokens count as rows.

    Args:
        rows: largest number of rows N, including the root.

    Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.3.
    """

    rows: Annotated[int, Ge(2), Le(MAX_NODES + 1)] = MAX_NODES + 1

    def build(self, calibration: DrafterCalibration, most: int = MAX_NODES) -> TreeSpec:
        return AutoTree().build(calibration, min(most, self.rows - 1))
