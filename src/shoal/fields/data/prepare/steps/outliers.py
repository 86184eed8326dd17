"""Outliers: numbers far outside the middle of their column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.protocols import (
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.fields.data.prepare.sketches import Sketches, TDigest
from shoal.ir import Machine

# Standard deviations of a normal distribution in its median absolute deviation.
_MAD = 1.4826


@part
class Outliers(Preparation):
    """Clip numbers to fences around the middle of their column, or drop the rows beyond.

    Args:
        columns: names; empty for all numbers.
        method: ``iqr``: ``factor`` interquartile ranges outside the quartiles. ``robust_z``:
            ``factor`` robust standard deviations from the median, taken from the quartiles.
        factor: how far.
        action: ``clip``; or ``drop``, which leaves held-out rows as they are.

    Source: Tukey, Exploratory Data Analysis, 1977; Iglewicz, Hoaglin, How to Detect and Handle
    Outliers, 1993.

    Differs: the median absolute deviation is half the interquartile range, as of a symmetric
    distribution, so that one sketch is enough.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    method: Literal["iqr", "robust_z"] = "iqr"
    factor: Annotated[float, Gt(0)] = 3.0
    action: Literal["clip", "drop"] = "clip"

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Columns in which something lies three interquartile ranges outside."""
        far = [
            one
            for one in work.profile.numbers(work.target)
            if one.beyond > 0.0005 and one.distinct > 10
        ]
        if far:
            yield (
                cls(columns=tuple(one.name for one in far)),
                Reason(
                    measured="; ".join(f"{one.name}: {100 * one.beyond:.2f} %" for one in far),
                    rule="values more than three interquartile ranges outside are clipped",
                ),
            )

    def sketch(self, batch: PrepBatch) -> Sketches:
        """A digest of each column."""
        names = batch.chosen(self.columns, "number", "outliers")
        return {name: TDigest.of(batch.there(name)) for name in names}

    def learn(self, sketches: Sketches) -> Learned:
        """The fences of each column; none where nothing is there, or half is one value."""
        fences = {}
        for name, digest in sketches.items():
            assert isinstance(digest, TDigest)
            low, middle, high = digest.quantile([0.25, 0.5, 0.75]).tolist()
            if not high > low:
                continue
            reach = self.factor * (high - low)
            if self.method == "robust_z":
                reach *= _MAD / 2
                low = high = middle
            fences[name] = [low - reach, high + reach]
        return fences

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Clip, or drop training rows."""
        if self.action == "clip":
            return batch.changed(
                {
                    name: column_of(np.clip(batch.numbers(name), *ends))
                    for name, ends in learned.items()
                }
            )
        if not batch.training:
            return batch
        inside = np.ones(batch.num_rows, bool)
        for name, (low, high) in learned.items():
            values = batch.numbers(name)
            inside &= ~((values < low) | (values > high))
        return batch.where(inside)

    def _value_s(self, rates: PrepareRates) -> float:
        return rates.sort_s + 2 * rates.scan_s
