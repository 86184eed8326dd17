"""Summaries of numbers that merge: each shard makes its own, and any order of merging will do.

A sketch is made of the values of one batch by ``of``, and of two sketches by ``merge``; ``dump``
and ``load`` carry it between processes as JSON. Nothing here keeps rows.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shoal.core.parts import load_object

# Centroids of a t-digest, about: a rank is then at most 0.3 % off.
_COMPRESSION = 1000.0
_HERE = "shoal.fields.data.prepare"
_KINDS = {
    "moments": f"{_HERE}.sketches:Moments",
    "tally": f"{_HERE}.sketches:Tally",
    "digest": f"{_HERE}.sketches:TDigest",
    "frequent": f"{_HERE}.counting:Frequent",
    "smallest": f"{_HERE}.counting:Smallest",
    "grid": f"{_HERE}.counting:CellCounts",
}


class Sketch(ABC):
    """What values have in common, in a size that does not grow with them."""

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """The sketch of the values of both; neither is changed."""

    def dump(self) -> dict[str, Any]:
        """As JSON; arrays bit by bit."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {one.name: _plain(getattr(self, one.name)) for one in fields}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Self:
        """What :meth:`dump` has written."""
        return cls(**{name: _array(one) for name, one in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "shape": value.shape, "base64": text}
    return dict(value) if isinstance(value, Mapping) else value


def _array(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "shape", "base64"}:
        kind = np.dtype(value["dtype"])
        return np.frombuffer(base64.b64decode(value["base64"]), kind).reshape(value["shape"])
    return value


@dataclass(frozen=True)
class Moments(Sketch):
    """Count, mean vector, scatter matrix, least and greatest of d columns.

    Args:
        count: rows.
        mean: [d].
        scatter: [d, d] sum of the products of deviations from the mean; [d] where only those of
            each column with itself are kept.
        low: [d].
        high: [d].

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.
    """

    count: int
    mean: np.ndarray
    scatter: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, *, joint: bool = False) -> Self:
        """Of rows of finite numbers [n, d]; with ``joint`` the products of all pairs too."""
        count, dim = values.shape
        if not count:
            zeros = np.zeros(dim)
            scatter = np.zeros((dim, dim)) if joint else zeros
            return cls(0, zeros, scatter, np.full(dim, np.inf), np.full(dim, -np.inf))
        mean = values.mean(axis=0)
        off = values - mean
        scatter = off.T @ off if joint else np.einsum("nd,nd->d", off, off)
        return cls(count, mean, scatter, values.min(axis=0), values.max(axis=0))

    @property
    def variance(self) -> np.ndarray:
        """[d] of the rows, as a population."""
        own = np.diagonal(self.scatter) if self.scatter.ndim == 2 else self.scatter
        return np.asarray(own / max(self.count, 1))

    @property
    def correlation(self) -> float:
        """Of the first two columns; 0 where one of them is constant."""
        product = float(self.scatter[0, 0] * self.scatter[1, 1])
        return float(self.scatter[0, 1]) / math.sqrt(product) if product > 0 else 0.0

    def merge(self, other: Self) -> Self:
        """Of the rows of both."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        outer = np.outer(delta, delta) if self.scatter.ndim == 2 else delta * delta
        return type(self)(
            count,
            (self.count * self.mean + other.count * other.mean) / count,
            self.scatter + other.scatter + outer * (self.count * other.count / count),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


@dataclass(frozen=True)
class Tally(Sketch):
    """Counts, or sums, by name, which add up."""

    counts: Mapping[str, float]

    def merge(self, other: Self) -> Self:
        """Of both."""
        counts = dict(self.counts)
        for name, count in other.counts.items():
            counts[name] = counts.get(name, 0) + count
        return type(self)(counts)


@dataclass(frozen=True)
class TDigest(Sketch):
    """Quantiles of numbers, by centroids that are small at both ends.

    Args:
        means: [c] ascending.
        weights: [c] values of each centroid.
        low: least value.
        high: greatest value.

    Source: Dunning, Ertl, Computing Extremely Accurate Quantiles Using t-Digests, 2019 (k1).
    """

    means: np.ndarray
    weights: np.ndarray
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Of finite numbers [n]."""
        ordered = np.sort(values)
        if not len(ordered):
            return cls(ordered, ordered, 0.0, 0.0)
        # The shares at which the units of k1 begin, each value being in the middle of its own.
        begin = (1 - np.cos(math.pi * np.arange(_COMPRESSION) / _COMPRESSION)) / 2
        first = np.unique(np.ceil(begin * len(ordered) - 0.5).astype(np.int64).clip(min=0))
        first = first[first < len(ordered)]
        weights = np.diff(first, append=len(ordered)).astype(float)
        return cls._of(np.add.reduceat(ordered, first), weights, ordered[0], ordered[-1])

    @classmethod
    def _packed(cls, means: np.ndarray, weights: np.ndarray, low: float, high: float) -> Self:
        """Put what lies within one unit of k1 together."""
        share = (np.cumsum(weights) - weights / 2) / weights.sum()
        unit = np.floor(_COMPRESSION / math.pi * (np.arcsin(2 * share - 1) + math.pi / 2))
        first = np.flatnonzero(np.diff(unit, prepend=-1.0))
        sums = np.add.reduceat(weights * means, first)
        return cls._of(sums, np.add.reduceat(weights, first), low, high)

    @classmethod
    def _of(cls, sums: np.ndarray, weights: np.ndarray, low: float, high: float) -> Self:
        return cls(np.clip(sums / weights, low, high), weights, float(low), float(high))

    def merge(self, other: Self) -> Self:
        """Of the values of both."""
        if not len(self.means) or not len(other.means):
            return self if len(self.means) else other
        means = np.concatenate([self.means, other.means])
        order = np.argsort(means, kind="stable")
        weights = np.concatenate([self.weights, other.weights])[order]
        low, high = min(self.low, other.low), max(self.high, other.high)
        return self._packed(means[order], weights, low, high)

    def quantile(self, shares: float | Sequence[float]) -> np.ndarray:
        """Values below which these shares lie; NaN of no values."""
        wanted = np.asarray(shares, float)
        if not len(self.means):
            return np.full_like(wanted, np.nan)
        at = np.cumsum(self.weights) - self.weights / 2
        places = np.concatenate([[0.0], at, [self.weights.sum()]]) / self.weights.sum()
        ends = np.concatenate([[self.low], self.means, [self.high]])
        return np.asarray(np.interp(wanted, places, ends))

    def rank(self, value: float) -> float:
        """Share of the values that lie below, about."""
        if not len(self.means):
            return 0.0
        shares = np.linspace(0, 1, 4001)
        return float(np.interp(value, self.quantile(list(shares)), shares))


Sketches = dict[str, Sketch]
"""Sketches by what they are of; those of the same name merge."""


def merged(left: Sketches, right: Sketches) -> Sketches:
    """Sketches of the values of both; what only one has is taken over."""
    both = {name: one.merge(right[name]) for name, one in left.items() if name in right}
    return {**left, **right, **both}


def dump_all(sketches: Sketches) -> dict[str, Any]:
    """As JSON."""
    kinds = {path.partition(":")[2]: kind for kind, path in _KINDS.items()}
    return {name: [kinds[type(one).__name__], one.dump()] for name, one in sketches.items()}


def load_all(data: Mapping[str, Any]) -> Sketches:
    """From JSON."""
    return {name: load_object(_KINDS[kind]).load(one) for name, (kind, one) in data.items()}
