"""Descriptors of the photographs of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.corpora import photos
from shoal.corpora.photos import DIM, photo_descriptors

pytest.importorskip("sklearn")


def test_they_are_unit_vectors_drawn_without_repetition() -> None:
    result = photo_descriptors(500)
    assert result.vectors.shape == (500, DIM)
    assert result.vectors.dtype == np.float32
    assert np.linalg.norm(result.vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    places = {(p, *c) for p, c in zip(result.photo.tolist(), result.corner.tolist(), strict=True)}
    assert len(places) == 500
    assert set(result.photo.tolist()) == {0, 1}
    assert np.array_equal(result.vectors, photo_descriptors(500).vectors)
    assert not np.array_equal(result.vectors, photo_descriptors(500, seed=1).vectors)


def test_a_histogram_is_that_of_its_patch() -> None:
    """One descriptor, computed pixel by pixel from the photograph."""
    datasets = pytest.importorskip("sklearn.datasets")
    result = photo_descriptors(50)
    image = datasets.load_sample_images().images[int(result.photo[7])]
    down, right = np.gradient(image.astype(float) @ (0.299, 0.587, 0.114))
    top, left = result.corner[7]
    wanted = np.zeros((4, 4, 8))
    for row in range(16):
        for column in range(16):
            y, x = down[top + row, left + column], right[top + row, left + column]
            turn = np.arctan2(y, x) % (2 * np.pi) / (2 * np.pi) * 8
            low, share = int(turn), turn - int(turn)
            cell = wanted[row // 4, column // 4]
            cell[low % 8] += np.hypot(y, x) * (1 - share)
            cell[(low + 1) % 8] += np.hypot(y, x) * share
    flat = np.minimum(wanted.ravel() / np.linalg.norm(wanted), 0.2)
    assert result.vectors[7] == pytest.approx(flat / np.linalg.norm(flat), abs=1e-5)


def test_it_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(sums[:, :21, :21] for sums in photos._photos())
    monkeypatch.setattr(photos, "_photos", lambda: few)
    result = photo_descriptors(1000)
    assert len(result.vectors) == 2 * 5 * 5
    assert "50 of 50" in result.note
    assert "1000 were asked for" in result.note


def test_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"photo_descriptors\.n"):
        photo_descriptors(0)
