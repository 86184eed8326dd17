"""MCA: causes that are on or off; in each dimension the largest of them alone is seen.

Source: Luecke, Sahani, Maximal Causes for Non-Linear Component Extraction, 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.maximal import MaximalLinear, MaximalReady
from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import CodingWork, Floats, SparseCodeError
from shoal.ir import Machine

# Share of the energy that may lie below zero: the noise around what is dark.
_NOISE = 0.05


def negative_share(data: Floats) -> float:
    """Share of the energy of data that lies in values below zero."""
    total = float(np.einsum("bd,bd->", data, data))
    below = np.minimum(data, 0.0)
    return float(np.einsum("bd,bd->", below, below)) / total if total else 0.0


@part
class MaximalCauses(MaximalLinear):
    """Causes are on or off, components are at least 0, and the largest is seen: occlusion."""

    non_negative: ClassVar[bool] = True

    def candidates(self, work: CodingWork, machine: Machine) -> Iterator[Self]:
        """For data that are at least 0, but for noise."""
        if work.negative <= _NOISE:
            yield self

    def check(self, data: Floats) -> None:
        """Refuse data with more below zero than noise around zero brings.

        Raises:
            SparseCodeError: names the model for data of either sign.
        """
        share = negative_share(data)
        if share > _NOISE:
            row, column = np.argwhere(data < 0)[0]
            raise SparseCodeError(
                f"mca: Negative values in data: {100 * share:.1f} % of the energy, such as "
                f"{data[row, column]:g} in row {row}, column {column}; maximal causes are at least "
                "0: use mmca, whose causes may have either sign, or shift the data"
            )

    def _scores(self, data: Floats, p: Floats, ready: MaximalReady) -> Floats:
        """How little of a component lies above the data: what is not there cannot be a cause."""
        overshoot = np.empty_like(p)
        library().overshoot(data, ready.W, overshoot)
        return -overshoot
