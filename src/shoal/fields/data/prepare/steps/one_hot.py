"""A column of zeros and ones for each category."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.counting import TOP, Frequent
from shoal.fields.data.prepare.protocols import (
    MOST_CATEGORIES,
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.fields.data.prepare.sketches import Sketches
from shoal.fields.data.readers import arrow
from shoal.ir import Machine


@part
class OneHot(Preparation):
    """Put a column ``NAME=CATEGORY`` of zeros and ones in the place of each column of text.

    A rare category, one that was not among the training rows, and a missing one are all zeros.

    Args:
        columns: names; empty for all text.
        most: categories of a column, the most frequent.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    most: Annotated[int, Ge(1), Le(TOP)] = MOST_CATEGORIES

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Text of few categories."""
        few = [one for one in work.profile.texts(work.target) if one.folded <= MOST_CATEGORIES]
        if few:
            yield (
                cls(columns=tuple(one.name for one in few)),
                Reason(
                    measured="; ".join(f"{one.name}: {one.folded:.0f} categories" for one in few),
                    rule=f"up to {MOST_CATEGORIES} categories get a column each",
                ),
            )

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Frequent categories."""
        names = batch.chosen(self.columns, "text", "one_hot")
        return {name: Frequent.of(batch.columns[name]) for name in names}

    def learn(self, sketches: Sketches) -> Learned:
        """Column -> its categories, in the order of the alphabet."""
        return {
            name: sorted(value for value, _ in one.ordered[: self.most])
            for name, one in sketches.items()
            if isinstance(one, Frequent)
        }

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """A column for each category."""
        batch.chosen(tuple(learned), "text", "one_hot")
        pa, changed = arrow(), dict[str, Any]()
        for name, values in learned.items():
            known = pa.array(values, pa.large_string())
            place = arrow("compute").index_in(batch.columns[name], known)
            codes = place.fill_null(-1).to_numpy(zero_copy_only=False)
            changed |= {f"{name}={v}": column_of(codes == at) for at, v in enumerate(values)}
        return batch.added(changed, drop=tuple(learned))

    def _value_s(self, rates: PrepareRates) -> float:
        return 2 * rates.text_s + self.most / 2 * rates.scan_s
