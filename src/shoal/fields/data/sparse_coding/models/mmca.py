"""MMCA: causes that are on or off; in each dimension the largest by magnitude is seen, with sign.

Source: Bornschein, Henniges, Luecke, Are V1 Simple Cells Optimized for Visual Occlusions? A
Comparative Study, 2013.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.maximal import MaximalLinear


@part
class MaximalMagnitudeCauses(MaximalLinear):
    """Causes are on or off; the component with the largest magnitude is seen, with its sign."""

    by_magnitude: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    coldest: ClassVar[float] = 35 / 34  # rho of 35 at most
    # Signs flip where two components are as large: half a step keeps from cycling.
    step: ClassVar[float] = 0.5
