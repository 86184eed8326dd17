"""A uniform sample of a given size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.counting import Smallest, mixed
from shoal.fields.data.prepare.protocols import (
    MOST_COLUMNS,
    Learned,
    Preparation,
    PrepareWork,
    Reason,
    width_of,
)
from shoal.fields.data.prepare.sketches import Sketches
from shoal.ir import Estimate, Machine


@part
class Reservoir(Preparation):
    """Keep a uniform sample of the training rows, as a reservoir does.

    Rows have random keys that follow from their place; the rows with the least keys are kept, so
    the sample of all data is found in those of the shards. Held-out rows all stay.

    Args:
        rows: that are kept; all, where there are fewer.
        seed: of the keys.

    Source: Efraimidis, Spirakis, Weighted Random Sampling with a Reservoir, 2006 (equal weights).
    """

    drops_rows: ClassVar = True

    rows: Annotated[int, Ge(1)] = 100_000
    seed: int = 1

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Where even the least of columns of all rows is too much for the memory."""
        width = min(width_of(work), MOST_COLUMNS)
        rows = (
            int(work.memory / (8 * width)) if work.memory < 8.0 * width * work.profile.rows else 0
        )
        if rows:
            yield (
                cls(rows=rows, seed=work.seed),
                Reason(
                    measured=f"{work.profile.rows:,} rows of {width} numbers are "
                    f"{human_bytes(8.0 * width * work.profile.rows)}",
                    rule=f"the prepared table is analysed in {human_bytes(work.memory)}",
                ),
            )

    def sketch(self, batch: PrepBatch) -> Sketches:
        """The least keys."""
        return {"keys": Smallest.of(mixed(batch.places, self.seed), self.rows)}

    def learn(self, sketches: Sketches) -> Learned:
        """The greatest key that is kept."""
        keys = sketches["keys"]
        assert isinstance(keys, Smallest)
        return {"last": int(keys.hashes[-1]) if len(keys.hashes) else 0}

    def estimate(self, work: PrepareWork, machine: Machine) -> Estimate:
        """The keys of all rows that are kept, while those of a shard are merged with them."""
        kept = min(self.rows, work.profile.rows)
        estimate = self._estimate(work, 1)
        return estimate.model_copy(update={"memory_bytes": {"runtime": 6 * 8.0 * kept}})

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Rows whose key is not above it."""
        if not batch.training:
            return batch
        return batch.where(mixed(batch.places, self.seed) <= learned["last"])
