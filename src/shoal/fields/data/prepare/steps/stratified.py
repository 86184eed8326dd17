"""A sample with as many rows of each class."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.counting import Smallest, mixed
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import Learned, Preparation
from shoal.fields.data.prepare.sketches import Sketches
from shoal.fields.data.readers import arrow

# Classes, at most.
_MOST = 1000


@part
class Stratified(Preparation):
    """Keep a uniform sample of the training rows of each class.

    Args:
        column: of the classes.
        rows: of each class; all, where there are fewer.
        seed: of the sample.
    """

    drops_rows: ClassVar = True

    column: str
    rows: Annotated[int, Ge(1)] = 1000
    seed: int = 1

    def _classes(self, batch: PrepBatch) -> tuple[list[str], np.ndarray]:
        """Names, and the number of each row's."""
        batch.chosen([self.column], "", "stratified")
        if batch.kind(self.column) == "other":
            raise PrepareError(
                f"stratified.column = {self.column!r}: is {batch.columns[self.column].type}; "
                "expected text or numbers"
            )
        coded = batch.columns[self.column].cast(arrow().string()).fill_null("").dictionary_encode()
        return coded.dictionary.to_pylist(), coded.indices.to_numpy()

    def sketch(self, batch: PrepBatch) -> Sketches:
        """The least keys of each class."""
        names, codes = self._classes(batch)
        if len(names) > _MOST:
            raise PrepareError(
                f"stratified.column = {self.column!r}: more than {_MOST} values; give a column of "
                "classes"
            )
        keys = mixed(batch.places, self.seed)
        return {one: Smallest.of(keys[codes == at], self.rows) for at, one in enumerate(names)}

    def learn(self, sketches: Sketches) -> Learned:
        """The greatest key of each class."""
        return {
            name: int(one.hashes[-1])
            for name, one in sketches.items()
            if isinstance(one, Smallest) and len(one.hashes)
        }

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Rows whose key is not above that of their class."""
        if not batch.training:
            return batch
        names, codes = self._classes(batch)
        last = np.array([learned.get(name, 0) for name in names], np.uint64)
        return batch.where(mixed(batch.places, self.seed) <= last[codes])
