"""Principal components in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
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
from shoal.fields.data.prepare.sketches import Moments, Sketches
from shoal.ir import Machine

# Columns up to which the guide has room for a covariance.
MOST_PCA = 2048


@part
class PCA(Preparation):
    """Put the leading principal components ``pc0``, ``pc1``, ... in the place of columns.

    Covariances of shards merge, so that one pass gives what the data in memory would.

    Args:
        columns: names; empty for all numbers.
        components: how many; all, where there are fewer columns.

    Source: Pearson, On Lines and Planes of Closest Fit, 1901; of merged covariances: Chan, Golub,
    LeVeque, 1979.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    components: Annotated[int, Ge(1)] = MOST_COLUMNS

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Where all columns of all rows are too much for the memory."""
        width = width_of(work)
        size = 8.0 * width * work.profile.rows
        if MOST_COLUMNS < width <= MOST_PCA and size > work.memory:
            measured = f"{width} columns of {work.profile.rows:,} rows are {human_bytes(size)}"
            rule = f"analysed in {human_bytes(work.memory)}: {MOST_COLUMNS} components"
            yield cls(components=MOST_COLUMNS), Reason(measured=measured, rule=rule)

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Mean and scatter of the columns together."""
        names = batch.chosen(self.columns, "number", "pca")
        return {"\x1f".join(names): Moments.of(batch.matrix(names, "pca"), joint=True)}

    def learn(self, sketches: Sketches) -> Learned:
        """Columns, their mean, and the components [components, columns]."""
        ((names, moments),) = sketches.items()
        assert isinstance(moments, Moments)
        _, vectors = np.linalg.eigh(moments.scatter / max(moments.count, 1))
        leading = vectors[:, ::-1][:, : self.components].T
        # As scikit-learn has it: the largest entry of a component is positive.
        signs = np.sign(leading[np.arange(len(leading)), np.abs(leading).argmax(axis=1)])
        return {
            "columns": names.split("\x1f"),
            "mean": moments.mean.tolist(),
            "components": (leading * signs[:, None]).tolist(),
        }

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Project."""
        names = batch.chosen(learned["columns"], "number", "pca")
        values = batch.matrix(names, "pca") - np.array(learned["mean"])
        scores = values @ np.array(learned["components"]).T
        return batch.added(
            {f"pc{at}": column_of(scores[:, at]) for at in range(scores.shape[1])}, drop=names
        )

    def _value_s(self, rates: PrepareRates) -> float:
        return (self.components + (len(self.columns) or MOST_COLUMNS)) * rates.scan_s / 2
