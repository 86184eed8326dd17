"""Handwritten digits whose training set is enlarged by small shifts and turns.

The validation images are split off before anything is augmented.
"""

from __future__ import annotations

import warnings

import numpy as np

from shoal.core.errors import MissingExtraError
from shoal.core.random import generator
from shoal.cost.scaling.curve import CurvePoint

__all__ = ["digits_curve"]


def _enlarged(images_NHW: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``size`` images, and beyond their number slightly turned and shifted copies.

    Returns:
        Images [size, 8, 8] and which original each is of.
    """
    from scipy import ndimage

    which = np.arange(size) % len(images_NHW)
    out = images_NHW[which].copy()
    random = generator(seed, purpose="learning_curves.augment")
    for i in range(len(images_NHW), size):
        turn, middle = np.deg2rad(random.uniform(-8, 8)), np.array([3.5, 3.5])
        matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        # One interpolation for both, so that copies are not blurred twice.
        offset = middle - matrix @ middle + random.uniform(-0.4, 0.4, 2)
        out[i] = ndimage.affine_transform(out[i], matrix, offset, order=1)
    return out, which


def digits_curve(
    seed: int, sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)
) -> list[CurvePoint]:
    """Error rates of a small network on held-out digits over nested training sets.

    Each original is the first of its kind; sets larger than their number are filled up
    with augmented copies.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
    except ImportError as cause:
        raise MissingExtraError("scikit-learn", "bench", "the claim learning_curves") from cause

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    points = []
    for size in sizes:
        errors = []
        # A small set's error depends on which images it got: more draws of it.
        seeds = 8 if size <= 256 else 4
        for turn in range(seeds):
            order = generator(seed, purpose="learning_curves.digits", index=turn).permutation(
                len(images)
            )
            held, pool = order[:500], order[500:]
            pool = pool[: min(size, len(pool))]
            x, which = _enlarged(images[pool], size, seed + 1000 * turn)
            network = MLPClassifier(
                (64,),
                max_iter=max(40, 40960 // size),
                random_state=turn,
                alpha=1e-3,
                tol=0.0,
                n_iter_no_change=1000,
                batch_size=min(64, size),
            )
            with warnings.catch_warnings():
                # The number of passes is fixed on purpose.
                warnings.simplefilter("ignore", ConvergenceWarning)
                network.fit(x.reshape(size, -1), labels[pool[which]])
            wrong = network.predict(images[held].reshape(len(held), -1)) != labels[held]
            errors.append(float(wrong.mean()))
        points.append(
            CurvePoint(
                size=float(size),
                value=float(np.mean(errors)),
                spread=float(np.std(errors, ddof=1)),
                trials=len(held) * seeds,
                metric="error rate",
            )
        )
    return points
