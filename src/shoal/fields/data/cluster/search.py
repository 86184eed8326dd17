"""The state of a swap search, and the native functions that work on it.

``reference.py`` has a function of numpy of the same name for each: the oracle of the tests, and
what is used, with one warning, where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.cluster import reference

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]

_FLAGS = ("-fopenmp", "-ffp-contract=fast")


class _Struct(ctypes.Structure):
    _fields_ = (
        ("n", c_int64),
        ("k", c_int64),
        *((name, c_void_p) for name in ("medoids", "to", "near", "next", "d1", "d2")),
        ("removal", c_void_p),
        ("is_medoid", c_void_p),
        ("loss", c_double),
        ("swaps", c_int64),
        ("since", c_int64),
    )


@functools.cache
def native(*flags: str) -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once.

    Args:
        flags: further compiler flags, by which the tests build it for other processors.
    """
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        library = build(source, name="kmedoids", flags=(*_FLAGS, *flags))
    except BuildError as cause:
        warnings.warn(f"k-medoids is some hundred times slower: {cause}", stacklevel=3)
        return None
    pointer = POINTER(_Struct)
    signatures: dict[str, list[Any]] = {
        "assign": [pointer],
        "apply_swap": [pointer, c_int64, c_int64, c_void_p],
        "eager": [pointer, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64],
        "best_swap": [pointer, c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p],
        "gains": [c_void_p, c_int64, c_int64, c_void_p, c_void_p],
        "expand": [c_void_p, c_int64, c_int64, c_int64, c_void_p],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int64 if name == "eager" else None
    return library


class MedoidSearch:
    """Medoids, and of every object its nearest and second-nearest.

    Args:
        medoids: int64 [k], distinct; copied.
        to: float32 [n, k], dissimilarity of each object to each medoid; is changed.
        library: the native functions; None for those of numpy.

    Attributes:
        near, next: int32 [n], places among the medoids of the nearest and the second.
        d1, d2: float32 [n], the dissimilarities to them.
        removal: float64 [k], what removing a medoid adds to the loss.
        is_medoid: uint8 [n].
        loss: sum of ``d1``, kept up by each swap.
        swaps: swaps made.
        since: candidates in a row that have brought nothing.
    """

    def __init__(self, medoids: Sequence[int] | Ids, to: Floats, library: Any = None) -> None:
        self.medoids: Ids = np.array(medoids, dtype=np.int64)
        self.to = np.ascontiguousarray(to, dtype=np.float32)
        self.n, self.k = self.to.shape
        self.near = np.zeros(self.n, np.int32)
        self.next = np.zeros(self.n, np.int32)
        self.d1 = np.zeros(self.n, np.float32)
        self.d2 = np.zeros(self.n, np.float32)
        self.removal = np.zeros(self.k, np.float64)
        self.is_medoid = np.zeros(self.n, np.uint8)
        self.is_medoid[self.medoids] = 1
        self.library = library
        self.loss, self.swaps, self.since = 0.0, 0, 0
        if library is None:
            reference.assign(self)
            return
        self._struct = _Struct(self.n, self.k)
        for name in ("medoids", "to", "near", "next", "d1", "d2", "removal", "is_medoid"):
            setattr(self._struct, name, getattr(self, name).ctypes.data)
        self._call("assign")

    def swap(self, place: int, candidate: int, row: Floats) -> None:
        """Put a candidate in the place of a medoid.

        Args:
            place: of the medoid that goes.
            candidate: the object that comes.
            row: float32 [n], its dissimilarities.
        """
        if self.library is None:
            reference.apply_swap(self, place, candidate, row)
        else:
            self._call("apply_swap", place, candidate, np.ascontiguousarray(row).ctypes.data)

    def _call(self, name: str, *arguments: Any) -> int:
        struct = self._struct
        struct.loss, struct.swaps, struct.since = self.loss, self.swaps, self.since
        done = getattr(self.library, name)(ctypes.byref(struct), *arguments)
        self.loss, self.swaps, self.since = struct.loss, struct.swaps, struct.since
        return int(done or 0)


def eager(
    search: MedoidSearch,
    rows: Floats,
    candidates: Ids,
    row_of: Ids,
    *,
    limit: int,
    threads: int = 1,
) -> int:
    """Take candidates in order, and make at once every swap that improves the loss.

    Args:
        search: is changed.
        rows: float32 [*, n], dissimilarities of candidates.
        candidates: int64 [c], objects.
        row_of: int64 [c], where the row of each lies among ``rows``.
        limit: end once so many in a row have brought nothing.
        threads: evaluate ahead; the result does not depend on it.

    Returns:
        How many candidates were taken.
    """
    if search.library is None:
        return reference.eager(search, rows, candidates, row_of, limit=limit)
    candidates, row_of = np.ascontiguousarray(candidates), np.ascontiguousarray(row_of)
    return search._call(
        "eager",
        rows.ctypes.data,
        candidates.ctypes.data,
        row_of.ctypes.data,
        len(candidates),
        limit,
        threads,
    )


def best_swap(
    search: MedoidSearch,
    rows: Floats,
    candidates: Ids,
    *,
    best: tuple[float, int, int, int] = (0.0, -1, -1, -1),
    textbook: bool = False,
    threads: int = 1,
) -> tuple[float, int, int, int]:
    """The swap that improves the loss most, of these candidates and of ``best``.

    Args:
        search: is only read.
        rows: float32 [c, n], dissimilarities of the candidates.
        candidates: int64 [c], objects.
        best: (change, place of the medoid, candidate, row) of earlier candidates.
        textbook: compute the change of every pair by itself, as PAM does, and not all k at once.
        threads: threads.
    """
    if search.library is None:
        return reference.best_swap(search, rows, candidates, best=best)
    change, place = np.array([best[0]]), np.array(best[1:], np.int64)
    candidates = np.ascontiguousarray(candidates)
    search._call(
        "best_swap",
        rows.ctypes.data,
        candidates.ctypes.data,
        len(candidates),
        int(textbook),
        threads,
        change.ctypes.data,
        place.ctypes.data,
    )
    return float(change[0]), int(place[0]), int(place[1]), int(place[2])


def gains(rows: Floats, nearest: Floats) -> npt.NDArray[np.float64]:
    """Float64 [c]: what each candidate would take off the loss as one more medoid.

    Args:
        rows: float32 [c, n], dissimilarities of the candidates.
        nearest: float32 [n], dissimilarity to the nearest medoid there is.
    """
    library = native()
    if library is None:
        return reference.gains(rows, nearest)
    gains = np.empty(len(rows), np.float64)
    rows = np.ascontiguousarray(rows)
    library.gains(
        rows.ctypes.data, rows.shape[1], len(rows), nearest.ctypes.data, gains.ctypes.data
    )
    return gains


def expand(lower: Floats, n: int, first: int, out: Floats) -> None:
    """Rows from ``first`` on of a symmetric matrix, of which the part below the diagonal is kept.

    Args:
        lower: float32 [n (n - 1) / 2], row by row.
        n: edge.
        first: row.
        out: float32 [rows, n], filled.
    """
    library = native()
    if library is None:
        reference.expand(lower, n, first, out)
    else:
        library.expand(lower.ctypes.data, n, first, len(out), out.ctypes.data)
