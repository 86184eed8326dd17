"""Locality-sensitive hashing of signatures: rows that share a band, found by sorting.

Source: Indyk, Motwani, Approximate Nearest Neighbors: Towards Removing the Curse of Dimensionality,
1998. A signature is cut into b bands of r slots. Two sets of Jaccard similarity s share a band with
probability 1 - (1 - s^r)^b. A band is an array of keys; rows of equal keys lie beside each other
when it is sorted, so there are no dicts, and one range of keys after the other is sorted where all
would not fit in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.errors import ConfigError, require
from shoal.fields.data.minhash.hasher import Hashes, Signatures, call, native

Rows = npt.NDArray[np.int64]

# Bytes of a row while a band is sorted: key, row, their order, and what is sorted.
_ROW_BYTES = 40


class Bands(NamedTuple):
    """How signatures are cut.

    Args:
        bands: how many.
        rows: slots of each.
    """

    bands: int
    rows: int


def collision(similarity: float, cut: Bands) -> float:
    """Probability that two sets of this Jaccard similarity share a band."""
    return float(1 - (1 - similarity**cut.rows) ** cut.bands)


@functools.lru_cache(256)
def optimal_bands(
    threshold: float, num_perm: int, *, false_positive: float = 0.5, false_negative: float = 0.5
) -> Bands:
    """The cut with the least weighted error, as datasketch and text-dedup choose it.

    Args:
        threshold: Jaccard similarity from which on sets should be found, in (0, 1].
        num_perm: slots of a signature.
        false_positive: weight of the mean probability that sets below the threshold are found.
        false_negative: weight of the mean probability that sets above it are not.

    Raises:
        ConfigError: the threshold is not in (0, 1].
    """
    from scipy.integrate import quad

    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold = {threshold:g}: expected a number in (0, 1]")
    best, least = Bands(1, num_perm), float("inf")
    for bands in range(1, num_perm + 1):
        for rows in range(1, num_perm // bands + 1):
            cut = Bands(bands, rows)
            wrong, _ = quad(collision, 0.0, threshold, args=(cut,))
            missed, _ = quad(lambda s, cut=cut: 1 - collision(s, cut), threshold, 1.0)
            error = false_positive * wrong + false_negative * missed
            if error < least:
                best, least = cut, error
    return best


def bands_reaching(threshold: float, recall: float, num_perm: int) -> Bands:
    """The cut with the longest bands, and no more of them than find enough of the similar sets.

    Args:
        threshold: Jaccard similarity at which sets should be found, in (0, 1].
        recall: probability of that, in (0, 1).
        num_perm: slots of a signature.

    Raises:
        ConfigError: a number beyond its range, or there are too few slots.
    """
    require(0 < threshold <= 1, "threshold", threshold, expected="a number in (0, 1]")
    require(0 < recall < 1, "recall", recall, expected="a number in (0, 1)")
    best = None
    for rows in range(1, num_perm + 1):
        alike = threshold**rows
        bands = 1 if alike == 1 else math.ceil(math.log1p(-recall) / math.log1p(-alike))
        if bands * rows > num_perm:
            break
        best = Bands(bands, rows)
    if best is None:
        raise ConfigError(
            f"threshold = {threshold:g}: to find {recall:.0%} of such sets {bands} slots are "
            f"needed, and there are {num_perm}; give more, or a higher threshold"
        )
    return best


def band_keys(signatures: Signatures, cut: Bands) -> Hashes:
    """Uint64 [bands, n]: a hash of each band of each signature.

    Args:
        signatures: uint32 [n, num_perm].
        cut: the bands.

    Raises:
        ConfigError: the bands need more slots than there are.
    """
    n, slots = signatures.shape
    if cut.bands * cut.rows > slots:
        raise ConfigError(
            f"{cut.bands} bands of {cut.rows} rows: {cut.bands * cut.rows} slots are needed, "
            f"num_perm = {slots}; give fewer, or a larger num_perm"
        )
    out = np.empty((cut.bands, n), np.uint64)
    signatures = np.ascontiguousarray(signatures, np.uint32)
    call(native(), "band_keys", signatures, n, slots, cut.bands, cut.rows, out)
    return out


class KeyedRows(NamedTuple):
    """Keys of some rows, perhaps mapped from a file.

    Args:
        keys: uint64 [bands, n].
        rows: int64 [n].
    """

    keys: Hashes
    rows: Rows


def sorted_runs(pieces: Sequence[KeyedRows], memory: float) -> Iterator[tuple[float, Hashes, Rows]]:
    """Rows by band and key; rows of equal keys follow each other, and come together.

    Args:
        pieces: of all rows.
        memory: bytes that may be used; the keys are read several times where they need more.

    Yields:
        Share that is done, keys in ascending order, rows.
    """
    bands = len(pieces[0].keys) if pieces else 0
    total = sum(len(piece.rows) for piece in pieces)
    ranges = max(1, int(np.ceil(total * _ROW_BYTES / memory)))
    edges = [at * 2**64 // ranges for at in range(ranges + 1)]
    for band in range(bands):
        for at in range(ranges):
            keys, rows = _between(pieces, band, edges[at], edges[at + 1])
            order = np.argsort(keys)
            yield (band + (at + 1) / ranges) / bands, keys[order], rows[order]


def _between(pieces: Sequence[KeyedRows], band: int, low: int, high: int) -> tuple[Hashes, Rows]:
    keys, rows = [], []
    for piece in pieces:
        some, of = np.asarray(piece.keys[band]), np.asarray(piece.rows, np.int64)
        if high - low < 2**64:
            inside = (some >= np.uint64(low)) & (some <= np.uint64(high - 1))
            some, of = some[inside], of[inside]
        keys.append(some)
        rows.append(of)
    return np.concatenate(keys), np.concatenate(rows)


class RowClusters:
    """Rows in clusters; a cluster is named by its first row.

    Args:
        n: rows.

    Attributes:
        parent: int64 [n], a forest; after :meth:`roots`, the first row of each row's cluster.
        compared: pairs that :meth:`unite_similar` has compared.
    """

    def __init__(self, n: int) -> None:
        self.parent = np.arange(n, dtype=np.int64)
        self.compared = 0

    def unite_equal(self, keys: Hashes, rows: Rows) -> None:
        """Unite the rows of equal keys; these are in order."""
        call(native(), "unite_equal", keys, rows, len(keys), self.parent)

    def unite_similar(self, keys: Hashes, rows: Rows, sets: ShingleSets, threshold: float) -> None:
        """Unite the rows of equal keys whose sets have this Jaccard similarity.

        A row is compared with the first of each group that its key has so far.
        """
        self.compared += call(
            native(),
            "unite_similar",
            *(keys, rows, len(keys), self.parent),
            *(sets.slot_of, sets.addresses, sets.sizes, threshold),
        )

    def roots(self) -> Rows:
        """Int64 [n]: the first row of each row's cluster."""
        call(native(), "flatten", self.parent, len(self.parent))
        return self.parent


class ShingleSets:
    """Sets of hashes of some rows, wherever they lie.

    Args:
        n: rows.
        pieces: (rows, sorted hashes, ends) of some rows each; kept as long as this is.
    """

    def __init__(self, n: int, pieces: Sequence[tuple[Rows, Hashes, Rows]]) -> None:
        self._pieces = [(rows, np.asarray(hashes), ends) for rows, hashes, ends in pieces]
        self.slot_of = np.full(n, -1, np.int64)
        addresses, sizes, taken = [], [], 0
        for rows, hashes, ends in self._pieces:
            begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
            addresses.append(hashes.ctypes.data + 8 * begins)
            sizes.append(ends - begins)
            self.slot_of[rows] = taken + np.arange(len(rows))
            taken += len(rows)
        empty = [np.empty(0, np.int64)]
        self.addresses = np.concatenate(addresses or empty).astype(np.int64)
        self.sizes = np.concatenate(sizes or empty).astype(np.int64)


def candidate_rows(
    pieces: Sequence[KeyedRows], n: int, memory: float, tick: Callable[[float], None]
) -> npt.NDArray[np.bool_]:
    """Bool [n]: rows that share a key with another."""
    result = np.zeros(n, np.bool_)
    for done, keys, rows in sorted_runs(pieces, memory):
        equal = keys[1:] == keys[:-1]
        result[rows[1:][equal]] = True
        result[rows[:-1][equal]] = True
        tick(done)
    return result
