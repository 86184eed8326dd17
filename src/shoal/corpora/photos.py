"""Patches of real photographs and their descriptors: many real vectors on every machine.

The two photographs that scikit-learn ships are cut into overlapping patches; each becomes a
histogram of its gradients, as image search has used them.

Source: Lowe, Distinctive Image Features from Scale-Invariant Keypoints, 2004 (4 x 4 cells of 8
orientations, normalised, cut at 0.2); Liu et al., SIFT Flow, 2011 (one at every pixel).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.errors import MissingExtraError, require
from shoal.core.extras import import_extra
from shoal.core.random import generator

DIM = 128
_CELL, _CELLS, _BINS = 4, 4, 8
_EDGE = _CELL * _CELLS
_LARGEST = 0.2


@dataclass(frozen=True)
class Descriptors:
    """Vectors and where they come from.

    Args:
        vectors: float32 [n, 128], each of norm 1.
        photo: int64 [n], number of the photograph.
        corner: int64 [n, 2], row and column of the patch.
        note: what a reader should know, such as that there are fewer than were asked for.
    """

    vectors: npt.NDArray[np.float32]
    photo: npt.NDArray[np.int64]
    corner: npt.NDArray[np.int64]
    note: str


def photo_descriptors(n: int, *, seed: int = 0) -> Descriptors:
    """Histograms of the gradients of n patches of 16 x 16, drawn without repetition.

    Args:
        n: how many; some half a million are there.
        seed: of the draw.

    Returns:
        Them, or all there are, in which case the note says how many.

    Raises:
        MissingExtraError: scikit-learn, or Pillow with which it reads photographs, is missing.
    """
    require(n >= 1, "photo_descriptors.n", n, expected="at least 1")
    photos = _photos()
    counts = [(h - _EDGE) * (w - _EDGE) for h, w in (p.shape[1:] for p in photos)]
    total = sum(counts)
    size = min(n, total)
    drawn = np.sort(generator(seed, purpose="photo descriptors").choice(total, size, replace=False))
    photo = np.searchsorted(np.cumsum(counts), drawn, side="right").astype(np.int64)
    inside = drawn - np.concatenate([[0], np.cumsum(counts)])[photo]
    wide = np.array([p.shape[2] - _EDGE for p in photos])[photo]
    corner = np.stack([inside // wide, inside % wide], axis=1).astype(np.int64)
    vectors = np.empty((size, DIM), np.float32)
    for number, sums in enumerate(photos):
        mine = photo == number
        vectors[mine] = _histograms(sums, corner[mine])
    note = f"{size} of {total} patches of {len(photos)} photographs of scikit-learn"
    if size < n:
        note += f"; {n} were asked for, and there are no more"
    # Neighbours in a photograph are not neighbours in the order.
    order = generator(seed, purpose="photo order").permutation(size)
    return Descriptors(vectors[order], photo[order], corner[order], note)


def photo_patches(n: int, edge: int = 12, *, seed: int = 0) -> npt.NDArray[np.float64]:
    """Grey values of n square patches, drawn at random, without their means.

    Args:
        n: how many; they may overlap.
        edge: pixels of a side.
        seed: of the draw.

    Returns:
        [n, edge * edge], of deviation 1 over all.

    Raises:
        MissingExtraError: as :func:`photo_descriptors`.
    """
    require(n >= 1, "photo_patches.n", n, expected="at least 1")
    draw = generator(seed, purpose="photo patches")
    photos = _grey("reading photographs")
    require(
        1 < edge <= min(min(photo.shape) for photo in photos),
        "photo_patches.edge",
        edge,
        expected=f"2 to {min(min(photo.shape) for photo in photos)}",
    )
    which = draw.integers(0, len(photos), n)
    patches = np.empty((n, edge * edge))
    for number, photo in enumerate(photos):
        mine = np.flatnonzero(which == number)
        windows = np.lib.stride_tricks.sliding_window_view(photo, (edge, edge))
        rows = draw.integers(0, windows.shape[0], len(mine))
        columns = draw.integers(0, windows.shape[1], len(mine))
        patches[mine] = windows[rows, columns].reshape(len(mine), -1)
    patches -= patches.mean(axis=1, keepdims=True)
    patches /= patches.std()
    return patches


def _grey(purpose: str) -> list[npt.NDArray[np.float64]]:
    datasets: Any = import_extra("sklearn.datasets", extra="fields", purpose=purpose)
    try:
        images = datasets.load_sample_images().images
    except ImportError:
        raise MissingExtraError("Pillow", "fields", purpose) from None
    return [image.astype(np.float64) @ (0.299, 0.587, 0.114) for image in images]


@functools.cache
def _photos() -> tuple[npt.NDArray[np.float64], ...]:
    """Of each photograph the sums of gradients left of and above each pixel, by orientation."""
    photos = []
    for grey in _grey("reading photographs"):
        down, right = np.gradient(grey)
        size = np.hypot(down, right)
        angle = np.arctan2(down, right) % (2 * np.pi) / (2 * np.pi) * _BINS
        low = np.floor(angle).astype(int)
        share = angle - low
        bins = np.zeros((_BINS, *grey.shape))
        for place in range(_BINS):  # a gradient counts for the two orientations it lies between
            bins[place] = np.where(low % _BINS == place, size * (1 - share), 0.0)
            bins[place] += np.where((low + 1) % _BINS == place, size * share, 0.0)
        sums = np.zeros((_BINS, grey.shape[0] + 1, grey.shape[1] + 1))
        sums[:, 1:, 1:] = bins.cumsum(axis=1).cumsum(axis=2)
        photos.append(sums)
    return tuple(photos)


def _histograms(
    sums: npt.NDArray[np.float64], corner: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    array = np.empty((len(corner), _CELLS, _CELLS, _BINS))
    for i in range(_CELLS):
        for j in range(_CELLS):
            top, left = corner[:, 0] + _CELL * i, corner[:, 1] + _CELL * j
            low, right = top + _CELL, left + _CELL
            cell = sums[:, low, right] - sums[:, top, right] - sums[:, low, left]
            array[:, i, j] = (cell + sums[:, top, left]).T
    flat = np.maximum(array.reshape(len(corner), DIM), 0.0)
    for limit in (_LARGEST, 1.0):
        norm = np.linalg.norm(flat, axis=1, keepdims=True)
        flat = np.minimum(flat / np.where(norm > 1e-9, norm, 1.0), limit)
    return flat.astype(np.float32)
