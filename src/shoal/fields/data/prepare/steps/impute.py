"""Missing values: put in what is usual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.counting import Frequent
from shoal.fields.data.prepare.profile import ColumnProfile
from shoal.fields.data.prepare.protocols import (
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.fields.data.prepare.sketches import Moments, Sketches, TDigest
from shoal.ir import Machine

# From which skew on, and beyond what share of outliers, the mean is far from most values.
_SKEW, _BEYOND = 0.2, 0.0005


@part
class Impute(Preparation):
    """Fill missing values with the mean, the median, or the most frequent text of their column.

    A column of numbers in which nothing was there becomes 0, one of text ``missing``.

    Args:
        columns: names; empty for all numbers, or with ``mode`` all text.
        strategy: ``mean``; ``median``, by t-digest; ``mode`` of texts, by space-saving; or
            ``missing``, a category of its own for texts.
        indicator: add a column ``NAME_missing`` with 1 where a number was missing.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    strategy: Literal["mean", "median", "mode", "missing"] = "median"
    indicator: bool = False

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """All numbers and texts, where anything is missing: held-out rows may miss others."""
        numbers, texts = work.profile.numbers(work.target), work.profile.texts(work.target)
        if not any(one.missing or 0 < one.numeric < 1 for one in [*numbers, *texts]):
            return
        odd = [one for one in numbers if abs(one.skew) > _SKEW or one.beyond > _BEYOND]
        even = [one for one in numbers if one not in odd]
        for columns, strategy, rule in (
            (odd, "median", "skewed numbers: the median"),
            (even, "mean", "symmetric numbers: the mean"),
            (
                [one for one in texts if one.missing > 0.05],
                "missing",
                "texts: a category from 5 % on",
            ),
            ([one for one in texts if one.missing <= 0.05], "mode", "texts: the most frequent"),
        ):
            if columns:
                yield (
                    cls(columns=tuple(one.name for one in columns), strategy=strategy),  # type: ignore[arg-type]
                    Reason(measured=_shares(columns), rule=rule),
                )

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Moments, a digest, or frequent texts of each column."""
        names = batch.chosen(self.columns, self._kind, "impute")
        if self.strategy in ("mode", "missing"):
            return {name: Frequent.of(batch.columns[name]) for name in names}
        if self.strategy == "median":
            return {name: TDigest.of(batch.there(name)) for name in names}
        return {name: Moments.of(batch.there(name)[:, None]) for name in names}

    @property
    def _kind(self) -> str:
        return "text" if self.strategy in ("mode", "missing") else "number"

    def learn(self, sketches: Sketches) -> Learned:
        """Column -> what is put in."""
        learned: dict[str, float | str] = {}
        for name, one in sketches.items():
            if isinstance(one, TDigest):
                learned[name] = float(one.quantile(0.5)) if len(one.means) else 0.0
            elif isinstance(one, Moments):
                learned[name] = float(one.mean[0])
            elif isinstance(one, Frequent):
                usual = one.ordered if self.strategy == "mode" else []
                learned[name] = usual[0][0] if usual else "missing"
        return learned

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Fill."""
        batch.chosen(tuple(learned), self._kind, "impute")
        changed, new = {}, {}
        for name, value in learned.items():
            if isinstance(value, str):
                changed[name] = batch.columns[name].fill_null(value)
                continue
            values = batch.numbers(name)
            gone = np.isnan(values)
            changed[name] = column_of(np.where(gone, value, values))
            if self.indicator:
                new[f"{name}_missing"] = column_of(gone)
        return batch.changed(changed).added(new)

    def _value_s(self, rates: PrepareRates) -> float:
        return (rates.sort_s if self.strategy == "median" else 2 * rates.scan_s) + 2 * rates.scan_s


def _shares(columns: list[ColumnProfile]) -> str:
    return "; ".join(f"{one.name}: {100 * one.missing:.1f} % missing" for one in columns)
