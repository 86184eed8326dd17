"""BSC: causes that are on or off, added up.

Source: Henniges et al., Binary Sparse Coding, 2010.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.linear import DiscreteLinear


@part
class BinaryCauses(DiscreteLinear):
    """Causes are on or off, and their components are added up."""

    # Sums of causes that all push one way: colder, a few components take all points in the first
    # iterations, and do not part any more. Of single starts on bars 7 of 30 find all of them at a
    # temperature of 2, and 37 of 40 at 8.
    hot: ClassVar[float] = 8.0
    apart: ClassVar[float] = 0.25
