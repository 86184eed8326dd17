"""Summaries of categories and rows that merge: frequent values, samples, combinations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.sketches import Sketch
from shoal.fields.data.readers import arrow

# Values that space-saving counts; hashes that say how many different values there are.
TOP, _HASHES = 256, 1024
# Cells of a grid of combinations.
MAX_CELLS = 100_000


@dataclass(frozen=True)
class Frequent(Sketch):
    """The most frequent values, each with a count that is at most ``off`` too small.

    Args:
        counts: value -> times that it was counted, at least.
        off: most that a count, also that of a value that is not here, falls short.

    Source: Metwally, Agrawal, El Abbadi, Efficient Computation of Frequent and Top-k Elements in
    Data Streams, 2005 (space-saving); Agarwal et al., Mergeable Summaries, 2012, in whose form
    counts are lower bounds.
    """

    counts: Mapping[str, int]
    off: int = 0

    @classmethod
    def of(cls, texts: Any) -> Self:
        """Of a text array of Arrow; null does not count."""
        rows = texts.drop_null().value_counts()
        values, counts = rows.field("values"), rows.field("counts").to_numpy()
        if len(counts) > TOP:
            order = np.argsort(-counts, kind="stable")[: TOP + 1]
            values, counts = values.take(arrow().array(order)), counts[order]
        return cls(dict(zip(values.to_pylist(), counts.tolist(), strict=True)))._cut()

    def _cut(self) -> Self:
        if len(self.counts) <= TOP:
            return self
        ordered = sorted(self.counts.items(), key=lambda one: (-one[1], one[0]))
        less = ordered[TOP][1]
        kept = {value: count - less for value, count in ordered[:TOP] if count > less}
        return type(self)(kept, self.off + less)

    @property
    def ordered(self) -> list[tuple[str, int]]:
        """The most frequent first; of equally frequent ones by their text."""
        return sorted(self.counts.items(), key=lambda one: (-one[1], one[0]))

    def merge(self, other: Self) -> Self:
        """Of the values of both."""
        counts = dict(self.counts)
        for value, count in other.counts.items():
            counts[value] = counts.get(value, 0) + count
        return type(self)(counts, self.off + other.off)._cut()


@dataclass(frozen=True)
class Smallest(Sketch):
    """The least k of different hashes: how many there are, and a sample that merges.

    Args:
        hashes: uint64 [at most k] ascending.
        k: kept.

    Source: Bar-Yossef et al., Counting Distinct Elements in a Data Stream, 2002 (k minimum values).
    """

    hashes: np.ndarray
    k: int = _HASHES

    @classmethod
    def of(cls, hashes: np.ndarray, k: int = _HASHES) -> Self:
        """Of hashes, uint64 [n]."""
        if len(hashes) > 8 * k:  # most lie far above what is kept
            low = _different(hashes[hashes <= np.partition(hashes, 4 * k)[4 * k]])
            if len(low) >= k:
                return cls(low[:k], k)
        return cls(_different(hashes)[:k], k)

    @property
    def distinct(self) -> float:
        """About how many different hashes there were; exact below k."""
        if len(self.hashes) < self.k:
            return float(len(self.hashes))
        return float((self.k - 1) / (float(self.hashes[-1]) / 2**64))

    def merge(self, other: Self) -> Self:
        """Of the hashes of both."""
        both = np.concatenate([self.hashes, other.hashes])
        return type(self)(_different(both)[: self.k], self.k)


@dataclass(frozen=True)
class CellCounts(Sketch):
    """How often each combination of values occurs; numbers are rounded down until they are few.

    The grid of a number is the finest of powers of two at which all combinations fit, which does
    not depend on the order of merging.

    Args:
        cells: combination -> rows; a number is its multiple of the step, a missing one None.
        level: the step of numbers is ``2**level``.
    """

    cells: Mapping[tuple[Any, ...], int]
    level: int = -20

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Self:
        """Of rows of numbers, texts and None."""
        fine, cells = 2.0**-cls.level, dict[tuple[Any, ...], int]()
        for row in rows:
            cell = tuple(math.floor(x * fine) if isinstance(x, float) else x for x in row)
            cells[cell] = cells.get(cell, 0) + 1
        return cls(cells)._fitting()

    def at(self, level: int) -> Self:
        """On a coarser grid."""
        if level == self.level:
            return self
        shift, cells = level - self.level, dict[tuple[Any, ...], int]()
        for row, count in self.cells.items():
            cell = tuple(x >> shift if isinstance(x, int) else x for x in row)
            cells[cell] = cells.get(cell, 0) + count
        return type(self)(cells, level)

    def _fitting(self) -> Self:
        grid = self
        while len(grid.cells) > MAX_CELLS:
            if grid.level > 1024:
                raise PrepareError(
                    f"more than {MAX_CELLS:,} combinations of texts; leave out columns, or shorten "
                    "their values"
                )
            grid = grid.at(grid.level + 1)
        return grid

    def merge(self, other: Self) -> Self:
        """Of the rows of both."""
        level = max(self.level, other.level)
        cells = dict(self.at(level).cells)
        for cell, count in other.at(level).cells.items():
            cells[cell] = cells.get(cell, 0) + count
        return type(self)(cells, level)._fitting()

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        rows = [[*cell, count] for cell, count in self.cells.items()]
        return {"cells": rows, "level": self.level}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Self:
        """From JSON."""
        return cls({tuple(row[:-1]): row[-1] for row in data["cells"]}, data["level"])


def _different(hashes: np.ndarray) -> np.ndarray:
    """The different ones, ascending; quicker than numpy's, which makes a table of them."""
    ordered = np.sort(hashes)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def mixed(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Hashes of 64-bit values, uint64 [n].

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014 (splitmix64).
    """
    state = values.view(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 1) % 2**64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def text_hashes(texts: Iterable[str]) -> np.ndarray:
    """Hashes of texts that are the same in every process, uint64 [n]."""
    digests = b"".join(blake2b(one.encode(), digest_size=8).digest() for one in texts)
    return np.frombuffer(digests, np.uint64)
