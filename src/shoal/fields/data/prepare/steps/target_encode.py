"""Categories as the mean target of the other rows that have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.counting import mixed, text_hashes
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import (
    MOST_CATEGORIES,
    MOST_CLASSES,
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
    encodable,
)
from shoal.fields.data.prepare.sketches import Sketches, Tally
from shoal.ir import Machine

# Values of the hash that separates categories.
_BUCKETS = 2**14
_SEP = "\x1f"
# Stands for a class where rows are counted.
_ROWS = "\x1e"


@part
class TargetEncode(Preparation):
    """Put the mean target of a category in its place, out of fold.

    A training row gets the mean of rows in other folds, so that its own target has no part in it;
    a held-out row gets that of all training rows. Means of few rows are drawn to the mean of all. A
    target of text becomes a column for each class but the first.

    Args:
        columns: names; empty for all text.
        folds: of the training rows, by their place.
        smoothing: rows that the mean of all counts for.
        seed: of the folds.

    Source: Micci-Barreca, A Preprocessing Scheme for High-Cardinality Categorical Attributes, 2001.

    Differs: categories share one of 16,384 places by their hash, so that their number has no limit;
    two that meet there have their mean in common.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    folds: Annotated[int, Ge(2), Le(20)] = 5
    smoothing: Annotated[float, Ge(0)] = 10.0
    seed: int = 1

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Text of many categories, where there is a target of numbers or some classes."""
        many = [one for one in work.profile.texts(work.target) if one.folded > MOST_CATEGORIES]
        if many and encodable(work):
            yield (
                cls(columns=tuple(one.name for one in many), seed=work.seed),
                Reason(
                    measured="; ".join(f"{one.name}: {one.folded:.0f} categories" for one in many),
                    rule=f"more than {MOST_CATEGORIES} categories: the mean target, out of fold",
                ),
            )

    def _codes(self, batch: PrepBatch, name: str) -> np.ndarray:
        """Bucket of each row; a missing category has one of its own."""
        coded = batch.columns[name].dictionary_encode()
        hashes = text_hashes(coded.dictionary.to_pylist()) % np.uint64(_BUCKETS)
        buckets = np.append(hashes.astype(np.int64), _BUCKETS)
        return np.asarray(buckets[coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)])

    def _folds(self, batch: PrepBatch) -> np.ndarray:
        return np.asarray((mixed(batch.places, self.seed + 1) % np.uint64(self.folds)).astype(int))

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Rows and sum of targets by column, class, fold and bucket."""
        if not batch.target:
            raise PrepareError("target_encode: the job has no target; name one with --target")
        names = batch.chosen(self.columns, "text", "target_encode")
        targets = _targets(batch)
        known = ~np.isnan(next(iter(targets.values()))) if targets else np.zeros(0, bool)
        folds, tally = self._folds(batch)[known], dict[str, float]()
        for name in names:
            cells = folds * (_BUCKETS + 1) + self._codes(batch, name)[known]
            there, at, count = np.unique(cells, return_inverse=True, return_counts=True)
            sums = {_ROWS: count.astype(float)}
            sums |= {c: np.bincount(at, y[known], len(there)) for c, y in targets.items()}
            for label, values in sums.items():
                head = f"{name}{_SEP}{label}{_SEP}"
                tally |= {
                    f"{head}{cell}": value
                    for cell, value in zip(there.tolist(), values.tolist(), strict=True)
                    if value
                }
        return {"sums": Tally(tally)}

    def learn(self, sketches: Sketches) -> Learned:
        """Column -> class -> bucket -> its mean without each fold, and of all."""
        tally = sketches.get("sums", Tally({}))
        assert isinstance(tally, Tally)
        shape = (self.folds, _BUCKETS + 1)
        sums = dict[str, dict[str, np.ndarray]]()
        for key, value in tally.counts.items():
            name, _, rest = key.partition(_SEP)
            label, _, cell = rest.rpartition(_SEP)
            by = sums.setdefault(name, {})
            by.setdefault(label, np.zeros(shape)).flat[int(cell)] += value
        if any(len(by) > MOST_CLASSES + 1 for by in sums.values()):
            raise PrepareError(
                f"target_encode: the target has more than {MOST_CLASSES} classes; make it a "
                "number, or use hash_encode"
            )
        learned = {}
        for name, by in sums.items():
            labels = sorted(by.keys() - {_ROWS})
            shown = labels[len(labels) > 1 :]
            learned[name] = {label: self._means(by[_ROWS], by[label]) for label in shown}
        return learned

    def _means(self, rows: np.ndarray, sums: np.ndarray) -> dict[str, list[float]]:
        out_rows = np.vstack([rows.sum(axis=0) - rows, rows.sum(axis=0)])
        out_sums = np.vstack([sums.sum(axis=0) - sums, sums.sum(axis=0)])
        whole = out_sums.sum(axis=1) / np.maximum(out_rows.sum(axis=1), 1)
        weight = np.maximum(out_rows + self.smoothing, 1e-12)
        means = (out_sums + self.smoothing * whole[:, None]) / weight
        there = np.flatnonzero(out_rows[-1])
        found = {str(at): means[:, at].tolist() for at in there}
        return found | {"": whole.tolist()}

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """A column for each class, or one for a target of numbers."""
        batch.chosen(tuple(learned), "text", "target_encode")
        side = self._folds(batch) if batch.training else np.full(batch.num_rows, self.folds)
        changed = {}
        for name, by in learned.items():
            codes = self._codes(batch, name)
            for label, means in by.items():
                table = np.tile(np.array(means[""]), (_BUCKETS + 1, 1))
                for bucket, row in means.items():
                    if bucket:
                        table[int(bucket)] = row
                changed[f"{name}~{label}"] = column_of(table[codes, side])
        return batch.added(changed, drop=tuple(learned))

    def _value_s(self, rates: PrepareRates) -> float:
        return 2 * rates.text_s + 2 * rates.sort_s


def _targets(batch: PrepBatch) -> dict[str, np.ndarray]:
    """Class -> 1 for its rows; of a target of numbers, ``y`` -> the numbers."""
    if batch.kind(batch.target) == "number":
        return {"y": batch.numbers(batch.target)}
    coded = batch.columns[batch.target].dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    gone = np.where(codes < 0, np.nan, 0.0)
    return {one: (codes == at) + gone for at, one in enumerate(coded.dictionary.to_pylist())}
