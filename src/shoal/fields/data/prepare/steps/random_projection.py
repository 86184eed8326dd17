"""Random projection: fewer columns without a pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.protocols import (
    MOST_COLUMNS,
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
    width_of,
)
from shoal.fields.data.prepare.steps.pca import MOST_PCA
from shoal.ir import Machine


@part
class RandomProjection(Preparation):
    """Put sums of columns with random weights, ``rp0``, ``rp1``, ..., in the place of columns.

    Distances between rows stay about the same.

    Args:
        columns: names; empty for all numbers.
        components: how many.
        seed: of the weights.

    Source: Johnson, Lindenstrauss, Extensions of Lipschitz Mappings into a Hilbert Space, 1984.
    """

    learns: ClassVar = False
    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    components: Annotated[int, Ge(1)] = MOST_COLUMNS
    seed: int = 1

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Where there are too many columns even for their covariance."""
        width = width_of(work)
        if width > MOST_PCA and 8.0 * width * work.profile.rows > work.memory:
            rule = f"more than {MOST_PCA} columns, for whose covariance there is no room"
            reason = Reason(measured=f"{width} columns", rule=rule)
            yield cls(components=MOST_COLUMNS, seed=work.seed), reason

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Project."""
        names = batch.chosen(self.columns, "number", "random_projection")
        random = generator(self.seed, purpose="random projection")
        weights = random.standard_normal((len(names), self.components))
        scores = batch.matrix(names, "random_projection") @ weights / math.sqrt(self.components)
        return batch.added(
            {f"rp{at}": column_of(scores[:, at]) for at in range(self.components)}, drop=names
        )

    def _value_s(self, rates: PrepareRates) -> float:
        return self.components * rates.scan_s / 2
