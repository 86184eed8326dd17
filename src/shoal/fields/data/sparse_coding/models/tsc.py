"""TSC: causes that are -1, 0 or 1, added up; both signs are as likely.

Source: Exarchakis et al., Ternary Sparse Coding, 2012.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.linear import DiscreteLinear


@part
class TernaryCauses(DiscreteLinear):
    """Causes are -1, 0 or 1, with one probability for both signs; components are added up."""

    tied: ClassVar[bool] = True

    @property
    def values(self) -> tuple[float, ...]:
        """1 and -1."""
        return (1.0, -1.0)
