"""The compiled loops of FastRP: rows of the projection, and products with compressed rows."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from shoal.core.native import build
from shoal.core.random import seed64
from shoal.fields.graph.graph import CSRGraph

_FLAGS = ("-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-mprefer-vector-width=512")


@functools.cache
def _native() -> ctypes.CDLL:
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    library = build(source, name="fastrp", flags=_FLAGS)
    p, n, i = c_void_p, c_int64, c_int
    library.fastrp_projection.argtypes = [p, n, n, c_uint64, c_uint64, p, i]
    library.fastrp_product.argtypes = [
        p, p, i, p, p, i, p, p, p, n, n, n, c_float, i, p, p, i,
    ]  # fmt: skip
    library.fastrp_projection.restype = library.fastrp_product.restype = None
    return library


def projection(keys: np.ndarray, dim: int, s: float, seed: int, *, threads: int = 1) -> np.ndarray:
    """Rows of the projection divided by the root of ``s``: int8 [len(keys), dim] of -1, 0 and 1.

    Args:
        keys: int64, which rows; the same key has the same row in any call.
        dim: numbers of each.
        s: one in ``s`` is not zero, at least 1.
        seed: of the projection.
        threads: that work.
    """
    keys = np.ascontiguousarray(keys, np.int64)
    rows = np.empty((len(keys), dim), np.int8)
    cut, drawn = round(2**32 / s), seed64(seed, purpose="fastrp")
    _native().fastrp_projection(
        keys.ctypes.data, len(keys), dim, drawn, cut, rows.ctypes.data, threads
    )
    return rows


def product(
    graph: CSRGraph,
    x: np.ndarray,
    factor: np.ndarray,
    *,
    scale: np.ndarray | None = None,
    rows: np.ndarray | slice,
    out: np.ndarray | None,
    mixed: np.ndarray | None = None,
    alpha: float = 0.0,
    normalise: bool = False,
    threads: int = 1,
) -> None:
    """``out[i] = factor[r] * sum_j S[r, j] scale[j] x[j]`` of some rows ``r``.

    A row does not depend on the threads, or on which rows are computed with it.

    Args:
        graph: the adjacency matrix S [N, N].
        x: int8 or float32 [N, d], contiguous.
        factor: float32 [N].
        scale: float32 [N]; None for ones.
        rows: int64 [R], or a range.
        out: float32 [R, d]; None if only the mixture is wanted.
        mixed: float32 [R, d], to which ``alpha`` times the rows is added.
        alpha: of this power.
        normalise: rows have length 1 when they are added.
        threads: that work.
    """
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def at(array: np.ndarray | None) -> int | None:
        return None if array is None else array.ctypes.data

    _native().fastrp_product(
        at(graph.indptr), at(graph.indices), int(graph.indices.dtype == np.int64),
        at(graph.weight), at(x), int(x.dtype == np.int8), at(scale), at(factor),
        None if isinstance(rows, slice) else at(rows), count,
        rows.start if isinstance(rows, slice) else 0, x.shape[1], alpha, int(normalise), at(out),
        at(mixed), threads,
    )  # fmt: skip
