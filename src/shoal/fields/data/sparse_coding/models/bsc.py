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

    apart: ClassVar[float] = 0.25
