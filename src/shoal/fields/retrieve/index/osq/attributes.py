"""Attributes of rows as codes of a few bits, and filters as what the kernel evaluates on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import suggestion
from shoal.core.extras import import_extra
from shoal.fields.retrieve.collections.filters import Condition, PointFilter, Scalar
from shoal.fields.retrieve.index.osq.quantise import cell_bounds
from shoal.fields.retrieve.index.protocols import VectorIndexError

_SAMPLE = 1 << 20
# Whole numbers that a float64 holds, distinct values of a category, conditions of a filter.
_WHOLE, _CATEGORIES, _CONDITIONS = 2**53, 65_535, 256
_AND, _OR, _NOT = -1, -2, -3


@dataclass(frozen=True)
class AttributeCells:
    """How an attribute is quantised.

    Args:
        name: of it.
        bits: of a code.
        low: float64 [cells], the least value in each cell; NaN for the cell of rows without one.
        high: the largest.
        categories: values whose numbers are stored, of text or of true and false; None for numbers.
    """

    name: str
    bits: int
    low: np.ndarray
    high: np.ndarray
    categories: Sequence[str | bool] | None
    numbers: Mapping[str | bool, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        known = {value: float(number) for number, value in enumerate(self.categories or ())}
        object.__setattr__(self, "numbers", known)


class AttributeCodes(NamedTuple):
    """An attribute of all rows.

    Args:
        cells: how it is quantised.
        codes: uint16 [n].
        exact: float64 [n], values or numbers of categories; NaN where there is none.
    """

    cells: AttributeCells
    codes: np.ndarray
    exact: np.ndarray


class FilterProgram(NamedTuple):
    """A filter for the kernel.

    Args:
        steps: int32, a condition's number, or -1 and, -2 or, -3 not; operands come first.
        attributes: int32 [conditions], which attribute each looks at.
        first: int64 [conditions + 1], its first interval.
        intervals: float64 [intervals, 2], closed.
    """

    steps: np.ndarray
    attributes: np.ndarray
    first: np.ndarray
    intervals: np.ndarray


def _arrow(module: str = "") -> Any:
    """A module of pyarrow; not by the reader of tables, whose imports would slow cold starts."""
    name = f"pyarrow.{module}" if module else "pyarrow"
    return import_extra(name, extra="fields", purpose="attributes of vectors")


def quantised(attributes: Any, rows: int, bits: int) -> list[AttributeCodes]:
    """Attributes of rows.

    Args:
        attributes: a table of Arrow, or a mapping of names to values; nulls are allowed.
        rows: how many there are.
        bits: most of a number's code.

    Raises:
        VectorIndexError: another number of rows; values of another type, or not finite.
    """
    library = _arrow()
    try:
        if isinstance(attributes, Mapping):
            attributes = library.table(dict(attributes))
        columns = {name: attributes.column(name) for name in attributes.schema.names}
    except (library.ArrowException, AttributeError, TypeError, ValueError) as cause:
        raise VectorIndexError(
            f"attributes: expected a table, or columns by name: {cause}"
        ) from cause
    return [_quantised(str(name), column, rows, bits) for name, column in columns.items()]


def _quantised(name: str, column: Any, rows: int, bits: int) -> AttributeCodes:
    types = _arrow("types")
    if len(column) != rows:
        raise VectorIndexError(f"attributes: {name!r} has {len(column)} values for {rows} rows")
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind, there = column.type, ~column.is_null().to_numpy(zero_copy_only=False)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind):
        return _categories(name, column.dictionary_encode(), there)
    if not (types.is_floating(kind) or types.is_integer(kind)):
        raise VectorIndexError(f"attributes: {name!r} holds {kind}; expected numbers or text")
    given = column.drop_null().to_numpy(zero_copy_only=False)
    whole = given.dtype.kind in "iu"
    if len(given) and (
        max(int(given.max()), -int(given.min())) > _WHOLE if whole else not np.isfinite(given).all()
    ):
        wanted = f"whole numbers up to {_WHOLE}" if whole else "finite numbers, or null for none"
        raise VectorIndexError(f"attributes: {name!r}: expected {wanted}")
    exact = np.full(rows, np.nan)
    exact[there] = values = given.astype(np.float64)
    step = max(1, len(values) // _SAMPLE)
    some = np.sort(values[::step])
    distinct = np.unique(values) if len(values) <= _SAMPLE else np.unique(some)
    room = 2**bits - (not there.all())  # a cell for rows without a value
    if len(distinct) <= room and len(values) <= _SAMPLE:
        bounds = distinct[1:]  # a value in each cell: nothing is ever verified
    else:
        bounds = cell_bounds(some, room)
    codes = np.full(rows, len(bounds) + 1, np.uint16)
    codes[there] = mine = np.searchsorted(bounds, values, side="right").astype(np.uint16)
    low, high = np.full(len(bounds) + 1, np.inf), np.full(len(bounds) + 1, -np.inf)
    np.minimum.at(low, mine, values)
    np.maximum.at(high, mine, values)
    return _with_none(AttributeCells(name, 0, low, high, None), codes, exact, there)


def _categories(name: str, encoded: Any, there: np.ndarray) -> AttributeCodes:
    words = encoded.dictionary.to_pylist()
    if len(words) > _CATEGORIES:
        raise VectorIndexError(
            f"attributes: {name!r} has {len(words)} different values; at most {_CATEGORIES}"
        )
    codes = np.full(len(there), len(words), np.uint16)
    codes[there] = encoded.indices.drop_null().to_numpy(zero_copy_only=False)
    exact = np.where(there, codes.astype(np.float64), np.nan)
    ends = np.arange(len(words), dtype=np.float64)
    return _with_none(AttributeCells(name, 0, ends, ends, words), codes, exact, there)


def _with_none(
    cells: AttributeCells, codes: np.ndarray, exact: np.ndarray, there: np.ndarray
) -> AttributeCodes:
    low, high = cells.low, cells.high
    if not there.all() or not len(low):
        low, high = np.append(low, np.nan), np.append(high, np.nan)
    bits = max(1, math.ceil(math.log2(len(low))))
    return AttributeCodes(
        AttributeCells(cells.name, bits, low, high, cells.categories), codes, exact
    )


def compiled(where: PointFilter | None, attributes: Sequence[AttributeCells]) -> FilterProgram:
    """A filter as the kernel takes it; without steps where every row passes.

    Raises:
        VectorIndexError: there is no such attribute, or it holds values of another type.
    """
    made = _Compiler(attributes)
    steps = [] if where is None else made.filter(where) or []
    if len(steps) > 4 * _CONDITIONS or len(made.attributes) > _CONDITIONS:
        raise VectorIndexError(f"where: {len(made.attributes)} conditions; at most {_CONDITIONS}")
    return FilterProgram(
        np.array(steps, np.int32),
        np.array(made.attributes, np.int32),
        np.array(made.first, np.int64),
        np.array(made.intervals, np.float64).reshape(-1, 2),
    )


class _Compiler:
    def __init__(self, attributes: Sequence[AttributeCells]) -> None:
        self._places = {one.name: place for place, one in enumerate(attributes)}
        self._all = attributes
        self.attributes: list[int] = []
        self.first = [0]
        self.intervals: list[tuple[float, float]] = []

    def filter(self, where: PointFilter) -> list[int] | None:
        """Steps; None where every row passes."""
        must = [self._one(one) for one in where.must]
        should = [self._one(one) for one in where.should]
        must_not = [self._one(one) for one in where.must_not]
        parts = [one for one in must if one is not None]
        if should and None not in should:
            parts.append(_joined([one for one in should if one is not None], _OR))
        for one in must_not:
            parts.append(self._leaf(0, []) if one is None else [*one, _NOT])
        return _joined(parts, _AND) if parts else None

    def _one(self, one: Condition | PointFilter) -> list[int] | None:
        if isinstance(one, PointFilter):
            return self.filter(one)
        place = self._places.get(one.key)
        if place is None:
            raise VectorIndexError(
                f"where: no attribute {one.key!r}{suggestion(one.key, self._places)}; there are "
                f"{', '.join(self._places) or 'none'}"
            )
        cells = self._all[place]
        if one.range is None:
            values = () if one.match is None else one.match.values
            some = (self._number(cells, value) for value in values)
            numbers = sorted({number for number in some if number is not None})
            return self._leaf(place, [(number, number) for number in numbers])
        if cells.categories is not None:
            raise VectorIndexError(
                f"where: {one.key!r} holds {_what(cells)}; expected = or in, not < or >"
            )
        low, high = -math.inf, math.inf
        if one.range.gte is not None:
            low = one.range.gte
        if one.range.gt is not None:
            low = max(low, math.nextafter(one.range.gt, math.inf))
        if one.range.lte is not None:
            high = one.range.lte
        if one.range.lt is not None:
            high = min(high, math.nextafter(one.range.lt, -math.inf))
        return self._leaf(place, [(low, high)] if low <= high else [])

    def _number(self, cells: AttributeCells, value: Scalar) -> float | None:
        """Of a value; None where no row can have it."""
        if cells.categories is None:
            right = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            right = isinstance(value, type(next(iter(cells.categories), value)))
        if not right:
            raise VectorIndexError(f"where: {cells.name!r} holds {_what(cells)}; {value!r} is none")
        if cells.categories is None:
            # A whole number that a float64 does not hold is in no row.
            whole = isinstance(value, int) and abs(value) > _WHOLE
            return None if whole else float(value)
        assert isinstance(value, str | bool)
        return cells.numbers.get(value)

    def _leaf(self, place: int, intervals: Sequence[tuple[float, float]]) -> list[int]:
        self.attributes.append(place)
        self.intervals.extend(intervals)
        self.first.append(len(self.intervals))
        return [len(self.attributes) - 1]


def _joined(parts: Sequence[list[int]], operator: int) -> list[int]:
    steps = list(parts[0])
    for one in parts[1:]:
        steps += [*one, operator]
    return steps


def _what(cells: AttributeCells) -> str:
    if cells.categories is None:
        return "numbers"
    return "true or false" if isinstance(next(iter(cells.categories), ""), bool) else "text"
