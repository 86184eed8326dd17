"""Measured kernel times as regular grids: sizes of each family, and what lies between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
AXES: dict[str, list[list[int]]] = {
    "gemm": [
        [2**n for n in range(15)],
        *[[64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 7168, 8192, 12288, 16384, 65536]]
        * 2,
    ],
    # Queries that share a key; sequences times heads of keys; tokens before.
    "decode": [
        [1, 4, 8, 16],
        [4**n for n in range(7)],
        [128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072],
    ],
    # Sequences times heads of queries; tokens.
    "prompt": [
        [1, 4, 16, 32, 64, 128, 256, 1024, 4096],
        [16, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    ],
}
"""Family -> sizes along each axis."""
POWERS: dict[str, list[float]] = {"prompt": [1, 2]}
"""Family -> powers with which time grows beyond each axis, where not 1."""


def fill(grid: Floats) -> Floats:
    """Fill what was not measured: between and beyond along every axis, on logarithms."""
    for _ in range(6):
        if not np.isnan(grid).any():
            break
        guesses = []
        for axis in range(grid.ndim):
            moved = np.moveaxis(grid, axis, -1)
            guess = np.full(moved.shape, np.nan)
            for at in np.ndindex(moved.shape[:-1]):
                line = moved[at]
                known = np.flatnonzero(~np.isnan(line))
                if len(known) < 2:
                    continue
                places = np.arange(len(line))
                guess[at] = np.interp(places, known, line[known])
                for side, end, beside in ((-1, known[0], known[1]), (1, known[-1], known[-2])):
                    slope = np.clip((line[beside] - line[end]) / (beside - end), 0.0, 2.0)
                    out = places < end if side < 0 else places > end
                    guess[at][out] = line[end] + slope * (places[out] - end)
            guesses.append(np.moveaxis(guess, -1, axis))
        stack = np.stack(guesses)
        count = (~np.isnan(stack)).sum(0)
        mean = np.where(count > 0, np.nansum(stack, 0) / np.maximum(count, 1), np.nan)
        grid = np.where(np.isnan(grid), mean, grid)
    return np.where(np.isnan(grid), np.nanmedian(grid), grid)


def distil(axes: list[list[int]], sizes: list[Floats], ms: Floats) -> tuple[Floats, float]:
    """(log2 us on the grid, median relative error of what it says of all rows)."""
    value = np.log2(np.maximum(ms, 1e-4) * 1e3)
    shape = [len(axis) for axis in axes]
    on = np.ones(len(ms), bool)
    places = []
    for axis, size in zip(axes, sizes, strict=True):
        place = np.clip(np.searchsorted(axis, size), 0, len(axis) - 1)
        on &= np.asarray(axis)[place] == size
        places.append(place)
    flat = np.ravel_multi_index([place[on] for place in places], shape)
    grid = np.full(int(np.prod(shape)), np.nan)
    order = np.argsort(flat, kind="stable")
    cells, starts = np.unique(flat[order], return_index=True)
    for cell, some in zip(cells, np.split(value[on][order], starts[1:]), strict=True):
        grid[cell] = np.median(some)
    whole = fill(grid.reshape(shape))
    from scipy.interpolate import RegularGridInterpolator

    look = RegularGridInterpolator([np.log2(axis) for axis in axes], whole)
    low, high = [np.log2(a[0]) for a in axes], [np.log2(a[-1]) for a in axes]
    inside = np.all([(s <= a[-1]) for a, s in zip(axes, sizes, strict=True)], axis=0)
    at = np.clip(np.log2(np.stack(sizes, 1)), low, high)[inside]
    error = float(np.median(np.abs(2.0 ** (look(at) - value[inside]) - 1.0)))
    return whole, error
