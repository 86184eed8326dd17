"""The profile of a table in one pass: what the guide's rules read, and what a report compares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.config import Value
from shoal.core.tables import Table, cut, digits, without_empty
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.counting import TOP, Frequent, Smallest, mixed, text_hashes
from shoal.fields.data.prepare.sketches import Moments, Sketches, Tally, TDigest
from shoal.fields.data.prepare.texts import folded, in_base, parsed, trimmed

# Classes of a target of text, at most, for which means are compared.
_CLASSES = 32
_SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SEP = "\x1f"
NUMERIC = 0.8
"""Share of texts that are numbers from which on a column is one of numbers."""


class ColumnProfile(Value):
    """One column.

    Args:
        name: of the column.
        kind: ``number``, ``text`` or ``other``.
        missing: share of rows without a value.
        distinct: different values, about from a thousand on.
        mean: of numbers, as those below; where texts are numbers, in the base of their units.
        std: of numbers, as a population.
        low: least number.
        high: greatest number.
        quantiles: of numbers, at 1, 5, 25, 50, 75, 95 and 99 %.
        beyond: share of numbers more than three interquartile ranges outside the quartiles.
        top: the most frequent texts, with their counts.
        numeric: share of the texts that are numbers, perhaps with a unit.
        units: unit -> how many of these numbers have it.
        folded: different texts where capitals and spaces do not count.
        association: with the target, 0 to 1: absolute correlation with a number, square root of the
            correlation ratio with classes.
    """

    name: str
    kind: str
    missing: float
    distinct: float
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    quantiles: tuple[float, ...] = ()
    beyond: float = 0.0
    top: tuple[tuple[str, int], ...] = ()
    numeric: float = 0.0
    units: dict[str, int] = {}
    folded: float = 0.0
    association: float = 0.0

    @property
    def is_number(self) -> bool:
        """Whether it is one, or will be once its texts are read as numbers."""
        return self.kind == "number" or self.numeric >= NUMERIC

    @property
    def skew(self) -> float:
        """How lopsided the numbers are, from -1 to 1: 0 where 5 and 95 % are as far from 50 %."""
        if not self.quantiles or self.quantiles[5] <= self.quantiles[1]:
            return 0.0
        low, middle, high = self.quantiles[1:6:2]
        return (high + low - 2 * middle) / (high - low)


class TableProfile(Value):
    """A table.

    Args:
        rows: how many.
        columns: in their order, the target among them.
    """

    rows: int
    columns: tuple[ColumnProfile, ...]

    def numbers(self, target: str) -> list[ColumnProfile]:
        """The columns of numbers that carry something, without the target."""
        return [one for one in self._useful(target) if one.is_number]

    def texts(self, target: str) -> list[ColumnProfile]:
        """The columns of categories that carry something, without the target."""
        return [one for one in self._useful(target) if one.kind == "text" and not one.is_number]

    def useless(self, target: str) -> dict[str, str]:
        """Column -> why it carries nothing."""
        return {
            one.name: why for one in self.columns if one.name != target and (why := self._why(one))
        }

    def _useful(self, target: str) -> list[ColumnProfile]:
        return [one for one in self.columns if one.name != target and not self._why(one)]

    def _why(self, one: ColumnProfile) -> str:
        if one.missing >= 0.95:
            return f"{100 * one.missing:.0f} % missing"
        if one.kind == "other":
            return "neither number nor text"
        if one.distinct <= 1:
            return "one value only"
        there = self.rows * (1 - one.missing)
        if there >= 100 and not one.is_number and one.distinct > 0.9 * there:
            return "a different text in almost every row"
        return ""

    def table(self, title: str, most: int = 40) -> Table:
        """As people read it."""
        rows = [
            (
                one.name,
                one.kind,
                f"{100 * one.missing:.1f} %",
                digits(one.distinct),
                *(map(_short, (one.mean, one.std)) if one.quantiles else ("", "")),
                *(map(_short, one.quantiles[1:6:2]) if one.quantiles else ("", "", "")),
                cut(next((text for text, _ in one.top), ""), 14),
                ", ".join(text[:16] for text, _ in one.top[:3]),
            )
            for one in self.columns[:most]
        ]
        names = ("column", "kind", "missing", "distinct", "mean", "std", "5 %", "50 %", "95 %")
        return without_empty(
            f"{title}: {self.rows:,} rows, {len(self.columns)} columns",
            (*names, "example", "most frequent"),
            rows,
            "  rrrrrrr  ",
        )


def _short(number: float) -> str:
    """Three digits; a rounding error of sums around 0 is 0."""
    if abs(number) < 1e-12:
        return "0"
    return digits(number) if abs(number) >= 1e-3 else f"{number:.2g}"


def sketch_profile(batch: PrepBatch) -> Sketches:
    """What a profile is made of, of one batch."""
    counts = {"rows": batch.num_rows}
    result: Sketches = {}
    for name in batch.columns:
        kind = batch.kind(name)
        counts[f"{kind}{_SEP}{name}"] = 0
        if kind == "number":
            finite = batch.there(name)
            counts[f"missing{_SEP}{name}"] = batch.num_rows - len(finite)
            result[f"moments{_SEP}{name}"] = Moments.of(finite[:, None])
            result[f"digest{_SEP}{name}"] = TDigest.of(finite)
            result[f"distinct{_SEP}{name}"] = Smallest.of(mixed(finite + 0.0))
        elif kind == "text":
            result |= _text(batch.columns[name], name, counts)
        else:
            counts[f"missing{_SEP}{name}"] = batch.columns[name].null_count
    if batch.target:
        result |= _with_target(batch)
    return {"counts": Tally(counts), **result}


def _text(texts: Any, name: str, counts: dict[str, int]) -> Sketches:
    rows = trimmed(texts).drop_null().value_counts()
    values, times = rows.field("values"), rows.field("counts").to_numpy()
    counts[f"missing{_SEP}{name}"] = len(texts) - int(times.sum())
    numbers, units = parsed(values)
    is_number = ~np.isnan(numbers)
    counts[f"numeric{_SEP}{name}"] = int(times[is_number].sum())
    bases = np.repeat(in_base(numbers, units)[is_number], times[is_number])
    found = dict[str, int]()
    for unit, count in zip(units.to_pylist(), times.tolist(), strict=True):
        if unit is not None:
            found[unit] = found.get(unit, 0) + count
    return {
        f"moments{_SEP}{name}": Moments.of(bases[:, None]),
        f"digest{_SEP}{name}": TDigest.of(bases),
        f"top{_SEP}{name}": Frequent.of(trimmed(texts)),
        f"units{_SEP}{name}": Frequent(found) if len(found) <= TOP else Frequent({}),
        f"distinct{_SEP}{name}": Smallest.of(text_hashes(values.to_pylist())),
        f"folded{_SEP}{name}": Smallest.of(text_hashes(folded(values).to_pylist())),
    }


def _with_target(batch: PrepBatch) -> Sketches:
    """Moments of each column of numbers, beside a target of numbers or by class of one of text."""
    names = [n for n in batch.columns if n != batch.target and batch.kind(n) == "number"]
    if batch.kind(batch.target) == "number":
        y = batch.numbers(batch.target)
        both = ((name, np.column_stack([batch.numbers(name), y])) for name in names)
        return {
            f"pair{_SEP}{name}": Moments.of(rows[~np.isnan(rows).any(axis=1)], joint=True)
            for name, rows in both
        }
    if batch.kind(batch.target) != "text":
        return {}
    coded = batch.columns[batch.target].dictionary_encode()
    classes = coded.dictionary.to_pylist()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    result: Sketches = {}
    for number, one in enumerate(classes[: _CLASSES + 1]):
        chosen = codes == number
        for name in names:
            values = batch.numbers(name)[chosen]
            values = values[~np.isnan(values)]
            result[f"class{_SEP}{name}{_SEP}{one}"] = Moments.of(values[:, None])
    return result


def profile_of(sketches: Sketches) -> TableProfile:
    """The profile of what all batches had."""
    tally = sketches.get("counts", Tally({}))
    assert isinstance(tally, Tally)
    counts = tally.counts
    columns = []
    for key in counts:
        kind, _, name = key.partition(_SEP)
        if kind in ("number", "text", "other"):
            columns.append(_column(name, kind, counts, sketches))
    return TableProfile(rows=int(counts.get("rows", 0)), columns=tuple(columns))


def _column(
    name: str, kind: str, counts: Mapping[str, float], sketches: Mapping[str, Any]
) -> ColumnProfile:
    rows = max(counts["rows"], 1)
    missing = counts[f"missing{_SEP}{name}"]
    known: dict[str, Any] = {"name": name, "kind": kind, "missing": missing / rows}
    if kind == "other":
        return ColumnProfile(**known, distinct=0.0)
    known["distinct"] = sketches[f"distinct{_SEP}{name}"].distinct
    if kind == "text":
        top: Frequent = sketches[f"top{_SEP}{name}"]
        known |= {
            "top": tuple(top.ordered[:10]),
            "numeric": counts[f"numeric{_SEP}{name}"] / max(rows - missing, 1),
            "units": dict(sketches[f"units{_SEP}{name}"].counts),
            "folded": sketches[f"folded{_SEP}{name}"].distinct,
        }
    moments: Moments = sketches[f"moments{_SEP}{name}"]
    if not moments.count:
        return ColumnProfile(**known)
    digest: TDigest = sketches[f"digest{_SEP}{name}"]
    quantiles = digest.quantile(_SHARES)
    fence = 3 * (quantiles[4] - quantiles[2])
    beyond = digest.rank(quantiles[2] - fence) + 1 - digest.rank(quantiles[4] + fence)
    return ColumnProfile(
        **known,
        mean=float(moments.mean[0]),
        std=math.sqrt(float(moments.variance[0])),
        low=float(moments.low[0]),
        high=float(moments.high[0]),
        quantiles=tuple(quantiles.tolist()),
        beyond=max(beyond, 0.0) if fence > 0 else 0.0,
        association=_association(name, sketches),
    )


def _association(name: str, sketches: Mapping[str, Any]) -> float:
    pair = sketches.get(f"pair{_SEP}{name}")
    if pair is not None:
        return abs(float(pair.correlation))
    by = [one for key, one in sketches.items() if key.startswith(f"class{_SEP}{name}{_SEP}")]
    if not 2 <= len(by) <= _CLASSES:
        return 0.0
    whole = by[0]
    for one in by[1:]:
        whole = whole.merge(one)
    total = float(whole.scatter[0])
    within = sum(float(one.scatter[0]) for one in by)
    return math.sqrt(max(0.0, 1 - within / total)) if total > 0 else 0.0
