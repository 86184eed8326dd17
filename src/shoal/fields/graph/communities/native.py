"""The compiled loops of communities, and the same in numpy: the oracle, and the fallback."""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import BuildError
from shoal.core.native import build

_FLAGS = ("-mprefer-vector-width=512",)


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        library = build(source, name="communities", flags=_FLAGS)
    except BuildError as cause:
        warnings.warn(f"queries of communities are slower: {cause}", stacklevel=3)
        return None
    p, n = c_void_p, c_int64
    library.equal_slots.argtypes = [p, n, p, n, p, n, p]
    library.follow_slots.argtypes = [p, n, n, p, n, p, p, p]
    library.band_mates.argtypes = [p, n, n, p, n, p]
    library.jaccard_rows.argtypes = [p, p, p, p, n, p, p, n, p]
    library.equal_slots.restype = library.follow_slots.restype = None
    library.jaccard_rows.restype = None
    library.band_mates.restype = n
    return library


def equal_slots(
    signatures: np.ndarray, rows: np.ndarray, others: np.ndarray, library: Any = ...
) -> np.ndarray:
    """Slots in which rows agree with others, int32 [n, m].

    Args:
        signatures: uint32 [N, K], contiguous.
        rows: int64 [n], from 0 to N - 1.
        others: int64 [m].
        library: of :func:`native`; None for numpy.
    """
    library = native() if library is ... else library
    equal = np.empty((len(rows), len(others)), np.int32)
    if library is None:
        for at, row in enumerate(rows):
            equal[at] = (signatures[others] == signatures[row]).sum(axis=1)
        return equal
    rows, others = (np.ascontiguousarray(one, np.int64) for one in (rows, others))
    library.equal_slots(
        signatures.ctypes.data, signatures.shape[1], rows.ctypes.data, len(rows),
        others.ctypes.data, len(others), equal.ctypes.data,
    )  # fmt: skip
    return equal


def follow_slots(
    signatures: np.ndarray, before: np.ndarray, after: np.ndarray, equal: np.ndarray,
    library: Any = ...,
) -> None:  # fmt: skip
    """Change the slots that signatures share with one, as that one changes.

    Args:
        signatures: uint32 [n, K], contiguous.
        before: uint32 [K].
        after: uint32 [K].
        equal: int32 [n], shared slots, changed in place.
        library: of :func:`native`; None for numpy.
    """
    library = native() if library is ... else library
    changed = np.flatnonzero(before != after)
    old, new = before[changed], after[changed]
    if library is None:
        some = signatures[:, changed]
        equal += ((some == new).sum(axis=1) - (some == old).sum(axis=1)).astype(np.int32)
        return
    library.follow_slots(
        signatures.ctypes.data, signatures.shape[1], len(signatures), changed.ctypes.data,
        len(changed), old.ctypes.data, new.ctypes.data, equal.ctypes.data,
    )  # fmt: skip


def band_mates(bands: np.ndarray, keys: np.ndarray, library: Any = ...) -> tuple[np.ndarray, int]:
    """How many bands each row shares with some signatures, int32 [N]; entries that name no row.

    Args:
        bands: uint64 [b, N], ascending in each band: the upper half of a key, then a row.
        keys: uint64 [b, s], of the signatures.
        library: of :func:`native`; None for numpy.
    """
    library = native() if library is ... else library
    count = bands.shape[1]
    shared = np.zeros(count, np.int32)
    if library is not None:
        keys = np.ascontiguousarray(keys)
        wrong = library.band_mates(
            bands.ctypes.data, count, len(bands), keys.ctypes.data, keys.shape[1],
            shared.ctypes.data,
        )  # fmt: skip
        return shared, int(wrong)
    low, wrong = np.uint64(0xFFFFFFFF), 0
    for band, row in zip(bands, keys & ~low, strict=True):
        for begin, end in zip(
            np.searchsorted(band, row), np.searchsorted(band, row | low, "right"), strict=True
        ):
            rows = (band[begin:end] & low).astype(np.int64)
            wrong += int((rows >= count).sum())
            np.add.at(shared, rows[rows < count], 1)
    return shared, wrong


def jaccard_rows(
    sets: Any, inverse: Any, rows: np.ndarray, *, later: bool = False, library: Any = ...
) -> np.ndarray:
    """Exact Jaccard similarities of some sets with all, float32 [n, N]; empty sets have none.

    Args:
        sets: sparse matrix [N, M] of SciPy in rows, indices ascending.
        inverse: its transpose in rows, indices ascending.
        rows: int64 [n], which sets.
        later: only those of sets behind each; the others are 0.
        library: of :func:`native`; None for SciPy.
    """
    library = native() if library is ... else library
    rows = np.ascontiguousarray(rows, np.int64)
    count = sets.shape[0]
    if library is None or sets.indices.dtype != np.int32:
        both = np.asarray((sets[rows].astype(np.float32) @ inverse).todense(), np.float32)
        sizes = np.diff(sets.indptr).astype(np.float32)
        similar = both / np.maximum(sizes[rows][:, None] + sizes - both, 1.0)
        return np.asarray(similar * (np.arange(count) > rows[:, None])) if later else similar
    similar = np.empty((len(rows), count), np.float32)
    above = rows if later else np.full(len(rows), -1)
    ends, others = (np.ascontiguousarray(one.indptr, np.int64) for one in (sets, inverse))
    library.jaccard_rows(
        ends.ctypes.data, sets.indices.ctypes.data, others.ctypes.data,
        inverse.indices.ctypes.data, count, rows.ctypes.data, above.ctypes.data, len(rows),
        similar.ctypes.data,
    )  # fmt: skip
    return similar
