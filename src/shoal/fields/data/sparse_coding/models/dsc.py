"""DSC: causes with values of a given set, added up; how likely each value is, is learned.

Source: Exarchakis, Luecke, Discrete Sparse Coding, 2017.
"""

from __future__ import annotations

import math
from typing import ClassVar

from shoal.core.errors import ConfigError
from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.linear import DiscreteLinear


@part
class DiscreteCauses(DiscreteLinear):
    """Causes have values of a set, with a probability for each; components are added up.

    Args:
        phi: the set; 0 is in it.
    """

    phi: tuple[float, ...] = (0.0, 1.0, 2.0)

    # Values that are several times as large make likelihoods sharper.
    hot: ClassVar[float] = 8.0

    def __post_init__(self) -> None:
        numbers = [float(v) for v in self.phi]
        if 0.0 not in numbers or len(set(numbers)) < max(len(numbers), 2):
            raise ConfigError(
                f"phi = {self.phi}: expected different values with 0 among them, and another"
            )
        if not all(map(math.isfinite, numbers)):
            raise ConfigError(f"phi = {self.phi}: expected finite values")

    @property
    def values(self) -> tuple[float, ...]:
        """The set without 0."""
        return tuple(float(v) for v in self.phi if v)
