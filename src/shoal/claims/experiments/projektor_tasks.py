"""The sources of the Projektor claim: digits and patches of photographs, skewed and mislabelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import shift

from shoal.core.random import generator
from shoal.fields.data.prune.protocols import PruneExamples, RowIds

Floats = npt.NDArray[np.float32]

# Rows of each source, of the validation data, and the share of the sources' labels that are drawn.
_ROWS, _VALIDATION, _NOISE = 1200, 400, 0.2
# Share of a source that its digits are; pixels by which images are moved.
_MAIN, _MOVED = 0.95, 0.6
_DIGITS = ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9))
# Share of the second photograph in each source; edges of patches and of their cells; patches lie
# whole in a block of the image, and blocks are for the sources or for validation.
_SECOND, _PATCH, _CELL, _BLOCK, _TESTED = (0.95, 0.9, 0.05), 16, 4, 48, 0.3
_DRAWN = 12_000


class MixtureTask(NamedTuple):
    """Three sources and what a model is to do well on.

    Args:
        sources: 1,200 rows each, in an order without meaning.
        validation: rows with right labels, not skewed.
    """

    sources: list[PruneExamples]
    validation: PruneExamples


def _digits(number: int) -> MixtureTask:
    """Each image is of one source; a source has copies of it, moved by parts of a pixel."""
    from sklearn.datasets import load_digits

    draw = generator(number, purpose="projektor digits")
    images, labels = load_digits(return_X_y=True)
    order = draw.permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8) / 16, labels[order].astype(np.int64)

    def moved(rows: RowIds) -> Floats:
        some = [shift(images[row], draw.uniform(-_MOVED, _MOVED, 2), order=1) for row in rows]
        return np.stack(some).reshape(len(rows), 64).astype(np.float32)

    first = np.arange(_VALIDATION)
    sources = []
    for part, main in zip(
        np.array_split(np.arange(_VALIDATION, len(images)), 3), _DIGITS, strict=True
    ):
        inside = np.isin(np.arange(10), main)
        wanted = np.where(inside, _MAIN / inside.sum(), (1 - _MAIN) / (~inside).sum())
        classes = draw.choice(10, _ROWS, p=wanted)
        rows = np.array([draw.choice(part[labels[part] == one]) for one in classes])
        sources.append(_mislabelled(PruneExamples(moved(rows), classes, 10), draw))
    return MixtureTask(sources, PruneExamples(moved(first), labels[first], 10))


def _photos(number: int) -> MixtureTask:
    """Which photograph a patch is of, by means and deviations of its cells' colours."""
    from sklearn.datasets import load_sample_images

    draw = generator(number, purpose="projektor photos")
    vectors, tested = [], []
    for image in load_sample_images().images:
        blocks = np.array(image.shape[:2]) // _BLOCK
        of_test = draw.random(tuple(blocks)) < _TESTED
        block = draw.integers(0, blocks, (_DRAWN, 2))
        corner = block * _BLOCK + draw.integers(0, _BLOCK - _PATCH + 1, (_DRAWN, 2))
        cells = np.stack([image[r : r + _PATCH, c : c + _PATCH] for r, c in corner]) / 255.0
        cells = cells.reshape(_DRAWN, _PATCH // _CELL, _CELL, _PATCH // _CELL, _CELL, 3)
        means, deviations = cells.mean(axis=(2, 4)), cells.std(axis=(2, 4))
        both = np.concatenate([means, deviations], axis=3).reshape(_DRAWN, -1)
        vectors.append(both.astype(np.float32))
        tested.append(of_test[block[:, 0], block[:, 1]])
    left = [iter(one[~test]) for one, test in zip(vectors, tested, strict=True)]
    sources = []
    for share in _SECOND:
        labels = (draw.random(_ROWS) < share).astype(np.int64)
        rows = np.stack([next(left[label]) for label in labels])
        sources.append(_mislabelled(PruneExamples(rows, labels, 2), draw))
    half = [one[test][: _VALIDATION // 2] for one, test in zip(vectors, tested, strict=True)]
    labels = np.repeat(np.arange(2), _VALIDATION // 2)
    return MixtureTask(sources, PruneExamples(np.concatenate(half), labels, 2))


def _mislabelled(examples: PruneExamples, draw: np.random.Generator) -> PruneExamples:
    wrong = draw.random(len(examples.X)) < _NOISE
    labels = np.where(wrong, draw.integers(0, examples.classes, len(wrong)), examples.labels)
    return PruneExamples(examples.X, labels, examples.classes)


MIXTURE_TASKS: dict[str, Callable[[int], MixtureTask]] = {"digits": _digits, "photos": _photos}
"""Name -> number of a draw -> task."""
