"""Data sets that clients share: scikit-learn's own, and images made of them."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.learn.protocols import Examples

_PURPOSE = "reading a data set"


def _datasets() -> Any:
    return import_extra("sklearn.datasets", extra="fields", purpose=_PURPOSE)


def held_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """What clients have, and a random share that the server tests on."""
    order = generator(seed, purpose="held-out examples").permutation(len(examples))
    cut = max(1, round(share * len(examples)))
    return examples.rows(np.sort(order[cut:])), examples.rows(np.sort(order[:cut]))


@part
class Digits:
    """Handwritten digits of 8 x 8 pixels, 1,797 of them; more by shifting and turning them.

    Args:
        size: images in all; those beyond the data set are changed copies. 0 for the data set.
        test: share that the server tests on; these are never copied.
        scale: enlargement of the sides, by interpolation: 2 for 16 x 16 pixels.
    """

    size: Annotated[int, Ge(0)] = 0
    test: Annotated[float, Gt(0), Lt(1)] = 0.2
    scale: Annotated[int, Ge(1), Le(8)] = 1

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Images [N, 1, 8 scale, 8 scale] in 0 to 1."""
        data = _datasets().load_digits()
        x = (data.images[:, None] / 16.0).astype(np.float32)
        if self.scale > 1:
            x = _enlarged(x, self.scale)
        whole = Examples(x=x, y=data.target.astype(np.int64), classes=10)
        train, test = held_out(whole, self.test, seed)
        return (_augmented(train, self.size, seed) if self.size > len(train) else train), test


def _enlarged(x: np.ndarray, scale: int) -> np.ndarray:
    """Images whose sides are so many times as long, by linear interpolation."""
    from scipy import ndimage

    larger: np.ndarray = ndimage.zoom(
        x, (1, 1, scale, scale), order=1, mode="nearest", grid_mode=True
    )
    return larger


def _augmented(examples: Examples, size: int, seed: int) -> Examples:
    """As many images as wanted: the given ones, and copies turned by up to 15 degrees and moved."""
    draw = generator(seed, purpose="changed images")
    rows = draw.integers(len(examples), size=size - len(examples))
    angles, moves = draw.uniform(-15, 15, len(rows)), draw.uniform(-1, 1, (len(rows), 2))
    copies = turned(examples.x[rows, 0], np.deg2rad(angles), moves)
    x = np.concatenate([examples.x, copies[:, None]])
    y = np.concatenate([examples.y, examples.y[rows]])
    return Examples(x=x, y=y, classes=examples.classes)


def turned(images: np.ndarray, angles: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Images [N, H, W] turned about their middle, then moved; bilinear, and 0 beyond the edge.

    Args:
        images: float32 [N, H, W].
        angles: radians [N], from the first axis to the second.
        moves: pixels [N, 2] along both axes.
    """
    count, high, wide = images.shape
    middle = np.array([(high - 1) / 2, (wide - 1) / 2])
    places = np.moveaxis(np.indices((high, wide)), 0, -1) - middle
    places = places - moves[:, None, None]
    cos, sin = (one[:, None, None] for one in (np.cos(angles), np.sin(angles)))
    down = cos * places[..., 0] + sin * places[..., 1] + middle[0]
    right = cos * places[..., 1] - sin * places[..., 0] + middle[1]
    # With an edge of zeros, every place that counts has four neighbours.
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    down, right = np.clip(down + 1, 0, high + 1), np.clip(right + 1, 0, wide + 1)
    y, x = down.astype(int), right.astype(int)
    v, u = (down - y).astype(np.float32), (right - x).astype(np.float32)
    n = np.arange(count)[:, None, None]
    above = padded[n, y, x] * (1 - u) + padded[n, y, x + 1] * u
    below = padded[n, y + 1, x] * (1 - u) + padded[n, y + 1, x + 1] * u
    result: np.ndarray = above * (1 - v) + below * v
    return result


@part
class BreastCancer:
    """Measurements of cell nuclei, benign or malignant: 569 rows of 30 numbers.

    Args:
        test: share that the server tests on.
    """

    test: Annotated[float, Gt(0), Lt(1)] = 0.2

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Rows [N, 30] with mean 0 and deviation 1."""
        return held_out(_tabular(_datasets().load_breast_cancer()), self.test, seed)


@part
class Wine:
    """Chemical analyses of wines of three growers: 178 rows of 13 numbers.

    Args:
        test: share that the server tests on.
    """

    test: Annotated[float, Gt(0), Lt(1)] = 0.2

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Rows [N, 13] with mean 0 and deviation 1."""
        return held_out(_tabular(_datasets().load_wine()), self.test, seed)


def _tabular(data: Any) -> Examples:
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    y = data.target.astype(np.int64)
    return Examples(x=x.astype(np.float32), y=y, classes=int(y.max()) + 1)
