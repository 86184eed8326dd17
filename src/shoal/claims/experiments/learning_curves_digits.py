"""Handwritten digits whose training set is enlarged by small shifts and turns.

The validation images are split off before anything is augmented.
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import MissingExtraError
from shoal.core.random import generator
from shoal.cost.scaling.curve import Point

__all__ = ["digits_curve"]


def _augmented(images_NHW: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` images, each a shifted and turned copy; and which original each is of."""
    from scipy import ndimage

    random = generator(seed, purpose="learning_curves.augment")
    which = random.integers(0, len(images_NHW), count)
    out = np.empty((count, 8, 8))
    turns, shifts = random.uniform(-12, 12, count), random.uniform(-0.7, 0.7, (count, 2))
    for i, source in enumerate(which):
        turned = ndimage.rotate(images_NHW[source], turns[i], reshape=False, order=1)
        out[i] = ndimage.shift(turned, shifts[i], order=1)
    return out, which


def digits_curve(
    seed: int, sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
) -> list[Point]:
    """Error rates of a small network on held-out digits over nested training sets.

    A set up to the number of originals has each original at most about once; larger ones
    are more augmented copies.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.neural_network import MLPClassifier
    except ImportError as cause:
        raise MissingExtraError("scikit-learn", "bench", "the claim learning_curves") from cause

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    order = generator(seed, purpose="learning_curves.digits").permutation(len(images))
    held, rest = order[:500], order[500:]
    points = []
    for size in sizes:
        errors = []
        seeds = 5 if size <= 512 else 3
        for turn in range(seeds):
            # Nested: a set's originals are the first ones of one order.
            pool = rest[: min(size, len(rest))]
            x, which = _augmented(images[pool], size, seed + 1000 * turn)
            network = MLPClassifier(
                (64,),
                max_iter=max(40, 40960 // size),
                random_state=turn,
                alpha=1e-3,
                tol=0.0,
                n_iter_no_change=1000,
                batch_size=min(64, size),
            )
            import warnings

            from sklearn.exceptions import ConvergenceWarning

            with warnings.catch_warnings():
                # The number of passes is fixed on purpose.
                warnings.simplefilter("ignore", ConvergenceWarning)
                network.fit(x.reshape(size, -1), labels[pool[which]])
            wrong = network.predict(images[held].reshape(len(held), -1)) != labels[held]
            errors.append(float(wrong.mean()))
        points.append(
            Point(
                size=float(size),
                value=float(np.mean(errors)),
                spread=float(np.std(errors, ddof=1)),
                trials=len(held) * seeds,
                metric="error rate",
            )
        )
    return points
