"""Categories as a few columns, by hashing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.counting import text_hashes
from shoal.fields.data.prepare.protocols import (
    MOST_CATEGORIES,
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
    encodable,
)
from shoal.ir import Machine


@part
class HashEncode(Preparation):
    """Put a few columns in the place of one of text; a category is -1 or 1 in one of them.

    Nothing is learned, so new categories are no exception. A missing one is all zeros.

    Args:
        columns: names; empty for all text.
        width: columns for each.

    Source: Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009.
    """

    learns: ClassVar = False
    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    width: Annotated[int, Ge(1), Le(1024)] = 8

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Text of many categories, where there is no target to encode them by."""
        many = [one for one in work.profile.texts(work.target) if one.folded > MOST_CATEGORIES]
        if many and not encodable(work):
            yield (
                cls(columns=tuple(one.name for one in many)),
                Reason(
                    measured="; ".join(f"{one.name}: {one.folded:.0f} categories" for one in many),
                    rule=f"more than {MOST_CATEGORIES} categories and no target for means: hashing",
                ),
            )

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Hash each category once."""
        names = batch.chosen(self.columns, "text", "hash_encode")
        changed = dict[str, Any]()
        for name in names:
            coded = batch.columns[name].dictionary_encode()
            hashes = text_hashes(coded.dictionary.to_pylist())
            codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            place = np.append((hashes % np.uint64(self.width)).astype(np.int64), -1)[codes]
            sign = np.append(1.0 - 2.0 * (hashes >> np.uint64(63)).astype(float), 0.0)[codes]
            changed |= {
                f"{name}#{at}": column_of(np.where(place == at, sign, 0.0))
                for at in range(self.width)
            }
        return batch.added(changed, drop=names)

    def _value_s(self, rates: PrepareRates) -> float:
        return rates.text_s + self.width * rates.scan_s
