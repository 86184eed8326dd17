"""The compiled gather of rows, which counts what it moves; in NumPy where it cannot be built."""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.graph.gather.protocols import LANES, LINE_BYTES, Moved


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        library = build(source, name="gather", flags=("-mprefer-vector-width=512",))
    except BuildError as cause:
        warnings.warn(f"gathers of features are slower: {cause}", stacklevel=3)
        return None
    p, n = c_void_p, c_int64
    library.gather_rows.argtypes = [p, n, p, p, n, p, c_int, p]
    library.gather_rows.restype = None
    return library


def gather_rows(
    table: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
    places: np.ndarray | None = None,
    *,
    aligned: bool = True,
    library: Any = ...,
) -> Moved:
    """Copy rows of a table, and count as a warp for each row would ask for them.

    Args:
        table: float32 [N, F], contiguous.
        rows: int64 [n], from 0 to N - 1.
        out: float32, contiguous; row ``i`` goes to ``out[i]``, or to ``out[places[i]]``.
        places: int64 [n]; None for the order of ``rows``.
        aligned: lanes are shifted, so that each iteration of a warp stays inside lines.
        library: of :func:`native`; None for NumPy.
    """
    library = native() if library is ... else library
    if library is None:
        out[slice(len(rows)) if places is None else places] = table[rows]
        bytes_moved = 4 * len(rows) * table.shape[1]
        requests, iterations = requests_of(table.ctypes.data, table.shape[1], rows, aligned=aligned)
        return Moved(bytes_moved, bytes_moved, requests, iterations)
    counters = np.zeros(4, np.int64)
    library.gather_rows(
        table.ctypes.data, table.shape[1], rows.ctypes.data,
        None if places is None else places.ctypes.data, len(rows), out.ctypes.data, aligned,
        counters.ctypes.data,
    )  # fmt: skip
    return Moved(*map(int, counters))


def requests_of(
    base: int, width: int, rows: np.ndarray, *, aligned: bool = True
) -> tuple[int, int]:
    """Requests of 128-byte lines, and iterations of warps, by arithmetic on addresses.

    Args:
        base: address of the table.
        width: floats of a row.
        rows: int64 [n].
        aligned: as of :func:`gather_rows`.
    """
    warps = -(-width // LANES)
    begins = base + 4 * width * rows
    if aligned:
        lines = (begins + 4 * width - 1) // LINE_BYTES - begins // LINE_BYTES + 1
        return int(lines.sum()), warps * len(rows)
    first = begins[:, None] + 4 * LANES * np.arange(warps)
    last = np.minimum(first + 4 * LANES, (begins + 4 * width)[:, None]) - 1
    return int((last // LINE_BYTES - first // LINE_BYTES + 1).sum()), warps * len(rows)
