"""Leave out rows in which something is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.protocols import Learned, Preparation, PrepareWork, Reason
from shoal.ir import Machine


@part
class DropMissing(Preparation):
    """Leave out training rows with missing values; held-out rows stay, for they are predicted.

    Args:
        columns: in which values must be there; empty for all.
    """

    learns: ClassVar = False
    drops_rows: ClassVar = True

    columns: tuple[str, ...] = ()

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Rows without a target teach nothing."""
        for one in work.profile.columns:
            if one.name == work.target and one.missing > 0:
                measured = f"{one.name}: {100 * one.missing:.1f} % missing"
                rule = "rows without the target teach nothing"
                yield cls(columns=(one.name,)), Reason(measured=measured, rule=rule)

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Only complete rows."""
        if not batch.training:
            return batch
        complete = np.ones(batch.num_rows, bool)
        for name in (
            batch.chosen(self.columns, "", "drop_missing") if self.columns else batch.columns
        ):
            if batch.kind(name) == "number":
                complete &= ~np.isnan(batch.numbers(name))
            else:
                complete &= batch.columns[name].is_valid().to_numpy(zero_copy_only=False)
        return batch.where(complete)
