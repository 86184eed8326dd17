"""Leave out columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.protocols import (
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.ir import Machine


@part
class DropColumns(Preparation):
    """Leave out columns that carry nothing: empty, constant, or different in every row.

    Args:
        columns: names.
    """

    learns: ClassVar = False

    columns: tuple[str, ...]

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """What the profile says carries nothing."""
        useless = work.profile.useless(work.target)
        if useless:
            measured = "; ".join(f"{name}: {why}" for name, why in useless.items())
            rule = "columns with 95 % missing, one value, or a text of its own in 90 % of the rows"
            yield cls(columns=tuple(useless)), Reason(measured=measured, rule=rule)

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Without the columns."""
        return batch.added({}, drop=batch.chosen(self.columns, "", "drop_columns"))

    def _value_s(self, rates: PrepareRates) -> float:
        return 0.0
