"""Numbers on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch, column_of
from shoal.fields.data.prepare.protocols import (
    Learned,
    Preparation,
    PrepareRates,
    PrepareWork,
    Reason,
)
from shoal.fields.data.prepare.sketches import Moments, Sketches, TDigest
from shoal.ir import Machine

# Places of the quantile function that are kept.
_PLACES = 257
# Skew from which on the guide takes ranks.
_SKEW = 0.8


@part
class Scale(Preparation):
    """Scale numbers: to mean 0 and variance 1, to 0 to 1, or to their share among the others.

    A constant column becomes 0; missing values stay missing.

    Args:
        columns: names; empty for all numbers.
        method: ``standard``, ``minmax``, or ``quantile``, the share of training values that lie
            below, from -1 to 1.
    """

    touches: ClassVar = "columns"

    columns: tuple[str, ...] = ()
    method: Literal["standard", "minmax", "quantile"] = "standard"

    @classmethod
    def candidates(cls, work: PrepareWork, machine: Machine) -> Iterator[tuple[Self, Reason]]:
        """Ranks of very skewed numbers, mean and variance of the others."""
        numbers = work.profile.numbers(work.target)
        odd = [one for one in numbers if abs(one.skew) > _SKEW and one.distinct > 10]
        even = [one for one in numbers if one not in odd]
        for columns, method, rule in (
            (even, "standard", "not very skewed: mean 0 and variance 1"),
            (odd, "quantile", f"skew beyond {_SKEW}: shares of the training values"),
        ):
            if columns:
                measured = "; ".join(f"{one.name}: skew {one.skew:.2f}" for one in columns)
                names = tuple(one.name for one in columns)
                part = cls(columns=names, method=method)  # type: ignore[arg-type]
                yield part, Reason(measured=measured, rule=rule)

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Moments or a digest of each column."""
        names = batch.chosen(self.columns, "number", "scale")
        if self.method == "quantile":
            return {name: TDigest.of(batch.there(name)) for name in names}
        return {name: Moments.of(batch.there(name)[:, None]) for name in names}

    def learn(self, sketches: Sketches) -> Learned:
        """Column -> offset and factor, or its quantiles."""
        learned = {}
        for name, one in sketches.items():
            if isinstance(one, TDigest):
                places = one.quantile(np.linspace(0, 1, _PLACES).tolist())
                learned[name] = np.nan_to_num(places).tolist()
            elif isinstance(one, Moments) and one.count:
                if self.method == "standard":
                    low, width = float(one.mean[0]), math.sqrt(float(one.variance[0]))
                else:
                    low, width = float(one.low[0]), float(one.high[0] - one.low[0])
                # What is left of a constant after rounding is no width.
                learned[name] = [low, 1 / width if width > 1e-13 * abs(low) else 0.0]
            else:
                learned[name] = [0.0, 0.0]
        return learned

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Scale."""
        batch.chosen(tuple(learned), "number", "scale")
        changed = {}
        for name, numbers in learned.items():
            values = batch.numbers(name)
            if self.method == "quantile":
                shares, first = np.linspace(-1, 1, _PLACES), np.array(numbers)
                # The middle of the shares that a frequent value spans.
                low = np.interp(values, first, shares)
                high = -np.interp(-values, -first[::-1], shares)
                changed[name] = column_of((low + high) / 2)
            else:
                changed[name] = column_of((values - numbers[0]) * numbers[1])
        return batch.changed(changed)

    def _value_s(self, rates: PrepareRates) -> float:
        return (2 * rates.sort_s if self.method == "quantile" else 3 * rates.scan_s) + rates.scan_s
