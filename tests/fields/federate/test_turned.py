"""Changed images against scipy's rotation and shift."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from shoal.fields.federate.learn.sources import turned


def test_turned_images_are_scipys():
    draw = np.random.default_rng(0)
    images = draw.random((6, 8, 9), np.float32)
    angles, moves = draw.uniform(-0.4, 0.4, 6), draw.uniform(-1, 1, (6, 2))
    middle = (np.array(images.shape[1:]) - 1) / 2
    for image, angle, move, mine in zip(
        images, angles, moves, turned(images, angles, moves), strict=True
    ):
        matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        offset = middle - matrix @ (middle + move)
        theirs = ndimage.affine_transform(image, matrix, offset, order=1, mode="grid-constant")
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    same = turned(images, np.zeros(6), np.zeros((6, 2)))
    np.testing.assert_allclose(same, images, atol=1e-6)
