"""Weighted sums of updates at the speed of memory: natively, or in numpy without a compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np

from shoal.core.errors import BuildError
from shoal.core.native import build

_FLAGS = ("-ffp-contract=fast", "-mprefer-vector-width=512")
# Numbers that stay in the cache while all updates are added to them.
_BLOCK = 1 << 16
# More threads than these gain nothing: two read as fast as most memories deliver.
_THREADS = 2


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    flags = _FLAGS if os.uname().machine in ("x86_64", "AMD64") else _FLAGS[:1]
    try:
        library = build(source, name="federate-sums", flags=flags)
    except BuildError as cause:
        warnings.warn(f"updates are summed three times slower: {cause}", stacklevel=3)
        return None
    library.weighted_sum.argtypes = [*[c_void_p] * 3, *[c_int64] * 4]
    library.weighted_sum.restype = None
    library.all_finite.argtypes = [c_void_p, c_int64]
    library.all_finite.restype = c_int64
    return library


def add_weighted(
    out: np.ndarray,
    updates: Sequence[np.ndarray],
    weights: Sequence[float] | np.ndarray,
    *,
    fresh: bool = False,
    threads: int = _THREADS,
) -> None:
    """Add updates, each times its weight, to a sum in place.

    Every element is summed in the order of the updates, whatever the threads and however the
    updates are grouped into calls.

    Args:
        out: float32 [P], contiguous.
        updates: K of float32 [P].
        weights: of each.
        fresh: what ``out`` holds does not count.
        threads: at most.
    """
    if not len(updates):
        if fresh:
            out[:] = 0
        return
    rows = [np.ascontiguousarray(one, np.float32) for one in updates]
    if any(one.shape != out.shape for one in rows):
        raise ValueError(f"updates of {[one.shape for one in rows]} for a sum of {out.shape}")
    coefficients = np.ascontiguousarray(weights, np.float32)
    library = native()
    if library is None:
        _add_numpy(out, rows, coefficients, fresh)
        return
    pointers = (c_void_p * len(rows))(*(one.ctypes.data for one in rows))
    library.weighted_sum(
        out.ctypes.data,
        pointers,
        coefficients.ctypes.data,
        len(rows),
        len(out),
        int(fresh),
        threads,
    )


def _add_numpy(out: np.ndarray, rows: list[np.ndarray], weights: np.ndarray, fresh: bool) -> None:
    scratch = np.empty(min(_BLOCK, len(out)), np.float32)
    for at in range(0, len(out), _BLOCK):
        block = out[at : at + _BLOCK]
        room = scratch[: len(block)]
        if fresh:
            block[:] = 0
        for row, weight in zip(rows, weights, strict=True):
            np.multiply(row[at : at + _BLOCK], weight, out=room)
            block += room


def weighted_sum(
    updates: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Sum of updates float32 [P], each times its weight: float32 [P]."""
    out = np.empty(len(updates[0]), np.float32)
    add_weighted(out, updates, weights, fresh=True)
    return out


def all_finite(x: np.ndarray) -> bool:
    """Whether a vector float32 [P] has neither NaN nor infinity."""
    library = native()
    if library is None or not x.flags.c_contiguous or x.dtype != np.float32:
        return bool(np.isfinite(x).all())
    return bool(library.all_finite(x.ctypes.data, x.size))
