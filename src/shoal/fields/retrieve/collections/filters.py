"""Conditions on the payload of points, in the form in which Qdrant takes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from pydantic import model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError

Scalar: TypeAlias = bool | int | float | str

_DEEPEST = 8


class Match(Value):
    """A value, or any of several.

    Args:
        value: that the attribute has, or that is in its list.
        any: several of which one is enough.
    """

    value: Scalar | None = None
    any: tuple[Scalar, ...] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Match:
        if (self.value is None) == (self.any is None):
            raise ValueError("expected value, or any, a list of values")
        return self

    @property
    def values(self) -> tuple[Scalar, ...]:
        """What is enough."""
        return self.any if self.value is None and self.any is not None else (self.value,)  # type: ignore[return-value]  # one of them is there


class Range(Value):
    """Bounds of a number.

    Args:
        gt: it is above.
        gte: at least.
        lt: below.
        lte: at most.
    """

    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None


class Condition(Value):
    """What an attribute has to be; a point without the attribute never fits.

    Args:
        key: name of the attribute.
        match: a value of it.
        range: bounds of it.
    """

    key: str
    match: Match | None = None
    range: Range | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Condition:
        if (self.match is None) == (self.range is None):
            raise ValueError(f"{self.key}: expected match, or range")
        return self


class PointFilter(Value):
    """Which points are meant.

    Args:
        must: all of them hold.
        should: at least one of them holds, if there are any.
        must_not: none of them holds.
    """

    must: tuple[Condition | PointFilter, ...] = ()
    should: tuple[Condition | PointFilter, ...] = ()
    must_not: tuple[Condition | PointFilter, ...] = ()

    @model_validator(mode="after")
    def _not_too_deep(self) -> PointFilter:
        if self.depth > _DEEPEST:
            raise ValueError(f"filters inside each other: at most {_DEEPEST}")
        return self

    def __and__(self, other: PointFilter) -> PointFilter:
        """Both hold."""
        return PointFilter(must=(*_inside(self, "must"), *_inside(other, "must")))

    def __or__(self, other: PointFilter) -> PointFilter:
        """One of them holds."""
        return PointFilter(should=(*_inside(self, "should"), *_inside(other, "should")))

    def __invert__(self) -> PointFilter:
        """It does not hold."""
        single = len(self.must) == 1 and not (self.should or self.must_not)
        return PointFilter(must_not=self.must if single else (self,))

    @property
    def depth(self) -> int:
        """Filters inside each other."""
        inner = (*self.must, *self.should, *self.must_not)
        return 1 + max((one.depth for one in inner if isinstance(one, PointFilter)), default=0)


def _inside(one: PointFilter, how: str) -> tuple[Condition | PointFilter, ...]:
    """What a filter joins in that way, or the filter itself: depth is for what needs it."""
    if len(one.must) == 1 and not (one.should or one.must_not):
        return one.must
    others = {"must", "should", "must_not"} - {how}
    alike = getattr(one, how) and not any(getattr(one, other) for other in others)
    return getattr(one, how) if alike else (one,)


class AttributeColumn:
    """An attribute in an expression, as :func:`col` gives it.

    Comparisons give filters, which ``&``, ``|`` and ``~`` join. A row without the attribute
    fits none of them.
    """

    __hash__ = None  # type: ignore[assignment]  # == makes a filter

    def __init__(self, name: str) -> None:
        self._name = name

    def __eq__(self, value: object) -> PointFilter:  # type: ignore[override]
        """It has this value."""
        return self.isin([value])

    def __ne__(self, value: object) -> PointFilter:  # type: ignore[override]
        """It has another value, or none."""
        return ~self.isin([value])

    def __lt__(self, value: float) -> PointFilter:
        """It is below."""
        return self._range(lt=value)

    def __le__(self, value: float) -> PointFilter:
        """At most."""
        return self._range(lte=value)

    def __gt__(self, value: float) -> PointFilter:
        """Above."""
        return self._range(gt=value)

    def __ge__(self, value: float) -> PointFilter:
        """At least."""
        return self._range(gte=value)

    def between(self, low: float, high: float) -> PointFilter:
        """From ``low`` to ``high``, both included."""
        return self._range(gte=low, lte=high)

    def isin(self, values: Iterable[Any]) -> PointFilter:
        """It has one of these values."""
        if isinstance(values, str):
            raise ConfigError(f"{self._name}.isin: expected several values, not {values!r}")
        chosen = tuple(_plain(one) for one in values)
        for one in chosen:
            if not isinstance(one, bool | int | float | str) or one != one:
                raise ConfigError(
                    f"{self._name}: cannot be compared with {one!r}; expected text, a number, or "
                    "true or false"
                )
        return PointFilter(must=(Condition(key=self._name, match=Match(any=chosen)),))

    def _range(self, **bounds: Any) -> PointFilter:
        for name, given in bounds.items():
            bounds[name] = bound = _plain(given)
            right = isinstance(bound, int | float) and not isinstance(bound, bool)
            if not right or not math.isfinite(bound):
                raise ConfigError(f"{self._name}: compared with {bound!r}; expected a number")
        return PointFilter(must=(Condition(key=self._name, range=Range(**bounds)),))


def col(name: str) -> AttributeColumn:
    """An attribute by its name: ``col("price").between(3, 9) & (col("lang") == "en")``."""
    return AttributeColumn(name)


def _plain(value: Any) -> Any:
    """Numbers of numpy as those of Python."""
    return value.item() if isinstance(value, np.generic) else value


class AttributeIndex:
    """Which points have which values.

    Values are compared by type as in JSON: ``1`` equals ``1.0``, and neither equals ``true``.
    """

    def __init__(self) -> None:
        self._ids: defaultdict[str, defaultdict[tuple[bool, Scalar], set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        self._sorted: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, point: int, payload: Mapping[str, Any]) -> None:
        """A point has come."""
        for key, values in _scalars(payload):
            self._sorted.pop(key, None)
            for value in values:
                self._ids[key][_kind(value)].add(point)

    def remove(self, point: int, payload: Mapping[str, Any]) -> None:
        """A point with that payload has gone."""
        for key, values in _scalars(payload):
            self._sorted.pop(key, None)
            for value in values:
                of = self._ids[key]
                of[_kind(value)].discard(point)
                if not of[_kind(value)]:
                    del of[_kind(value)]

    def select(self, where: PointFilter, everything: np.ndarray) -> np.ndarray:
        """The points that a filter means, int64, sorted.

        Args:
            where: the filter.
            everything: all points, sorted.
        """
        fits = everything
        for one in where.must:
            fits = np.intersect1d(fits, self._one(one, everything), assume_unique=True)
        if where.should:
            some = [self._one(one, everything) for one in where.should]
            fits = np.intersect1d(fits, np.unique(np.concatenate(some)), assume_unique=True)
        for one in where.must_not:
            fits = np.setdiff1d(fits, self._one(one, everything), assume_unique=True)
        return fits

    def _one(self, one: Condition | PointFilter, everything: np.ndarray) -> np.ndarray:
        if isinstance(one, PointFilter):
            return self.select(one, everything)
        if one.match is not None:
            of: Mapping[tuple[bool, Scalar], set[int]] = self._ids.get(one.key, {})
            ids = {id_ for value in one.match.values for id_ in of.get(_kind(value), ())}
            return np.sort(np.fromiter(ids, np.int64, len(ids)))
        assert one.range is not None
        values, points = self._numbers(one.key)
        low, high = 0, len(values)
        for bound, side, lower in (
            (one.range.gt, "right", True),
            (one.range.gte, "left", True),
            (one.range.lt, "left", False),
            (one.range.lte, "right", False),
        ):
            if bound is None:
                continue
            at = int(np.searchsorted(values, bound, side=side))  # type: ignore[call-overload]  # one of the two
            low, high = (max(low, at), high) if lower else (low, min(high, at))
        return np.unique(points[low : max(low, high)])

    def _numbers(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of an attribute, sorted, and whose they are."""
        if key not in self._sorted:
            pairs = [
                (float(value), point)
                for (truth, value), points in self._ids.get(key, {}).items()
                if not truth and isinstance(value, int | float)
                for point in points
            ]
            values = np.array([value for value, _ in pairs], np.float64)
            points = np.array([point for _, point in pairs], np.int64)
            order = np.argsort(values, kind="stable")
            self._sorted[key] = values[order], points[order]
        return self._sorted[key]


def _kind(value: Scalar) -> tuple[bool, Scalar]:
    """A key in which True and 1 differ."""
    return isinstance(value, bool), value


def _scalars(payload: Mapping[str, Any]) -> Iterable[tuple[str, list[Scalar]]]:
    for key, value in payload.items():
        values = value if isinstance(value, list) else [value]
        yield key, [one for one in values if isinstance(one, bool | int | float | str)]
