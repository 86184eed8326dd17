"""Projektor: transport against POT, both stages against what they must give, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("ot")

import ot

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import table
from shoal.fields.data.curate.projektor import Projektor, distance
from shoal.fields.data.curate.projektor.distance import (
    MixtureDistance,
    calibrated,
    euclidean,
    label_distances,
    transport,
)
from shoal.fields.data.curate.projektor.probes import counts_of, linear_probe
from shoal.fields.data.curate.projektor.surface import (
    ScoreSurface,
    lattice,
    on_simplex,
    polynomials,
    projected,
)
from shoal.fields.data.prune.protocols import PruneExamples

SKEWS = ((0.7, 0.2, 0.1), (0.1, 0.7, 0.2), (0.2, 0.1, 0.7))
EVEN = (1 / 3, 1 / 3, 1 / 3)


def rows(n: int, skew: tuple[float, ...], seed: int, scale: float = 1.0) -> PruneExamples:
    draw = np.random.default_rng(seed)
    y = draw.choice(3, n, p=skew)
    X = draw.normal(size=(n, 5)) + 2 * np.eye(3, 5)[y]
    return PruneExamples((scale * X).astype(np.float32), y, 3)


def sources(n: int = 60, scale: float = 1.0) -> list[PruneExamples]:
    return [rows(n, skew, seed, scale) for seed, skew in enumerate(SKEWS)]


@pytest.fixture(scope="module")
def fitted() -> Projektor:
    projektor = Projektor(
        sources(), rows(80, EVEN, 9), sizes=(30, 60), mixtures=21, probes=2, probe=share
    )
    return projektor.fit()


def share(train: PruneExamples, test: PruneExamples) -> float:
    """A probe without training: better the more rows there are, and the more even the classes."""
    counts = np.bincount(train.labels, minlength=3)
    return float(0.5 + 0.4 * np.mean(counts / (counts + 10)))


def test_transport_is_that_of_pot() -> None:
    some, other = sources(), rows(50, EVEN, 9)
    ours = MixtureDistance(some, other, 2.0)
    for mixture in ((0.2, 0.5, 0.3), (0.0, 0.4, 0.6), (1.0, 0.0, 0.0)):
        weights = np.concatenate([np.full(60, part / 60) for part in mixture])
        cost = np.concatenate(
            [
                np.linalg.norm(one.X[:, None] - other.X[None], axis=2)
                + 2.0 * label_distances(one, other)[one.labels][:, other.labels]
                for one in some
            ]
        )
        expected = ot.emd2(weights, np.full(50, 1 / 50), cost.astype(np.float64))
        assert ours.of(np.array(mixture))[0] == pytest.approx(expected, rel=1e-6)


def test_labels_are_as_far_apart_as_their_points() -> None:
    one, other = rows(60, EVEN, 0), rows(50, EVEN, 9)
    for a in range(3):
        for b in range(3):
            some, others = one.X[one.y == a], other.X[other.y == b]
            expected = ot.emd2([], [], euclidean(some, others))
            assert label_distances(one, other)[a, b] == pytest.approx(expected, rel=1e-9)


def test_distances_scale_with_features() -> None:
    mixture = np.array([0.2, 0.5, 0.3])
    one = MixtureDistance(sources(), rows(50, EVEN, 9)).of(mixture)
    four = MixtureDistance(sources(scale=4.0), rows(50, EVEN, 9, scale=4.0)).of(mixture)
    assert four[0] == pytest.approx(4 * one[0], rel=1e-6)


def test_wrong_labels_are_far_and_other_names_are_not() -> None:
    right = rows(60, EVEN, 0)
    drawn = np.random.default_rng(0).permutation(right.labels)
    some = [PruneExamples(right.X, y, 3) for y in (right.labels, drawn, (right.labels + 1) % 3)]
    ours = MixtureDistance(some, rows(50, EVEN, 9))
    known, wrong, renamed = (ours.of(one)[0] for one in np.eye(3))
    assert wrong > 1.1 * known
    assert renamed == pytest.approx(known)


def test_gradients_are_finite_differences() -> None:
    both = MixtureDistance(sources(), rows(50, EVEN, 9))
    mixture, step = np.array([0.2137, 0.4931, 0.2932]), 1e-6
    means = both.of(mixture)[1]
    slopes = []
    for at, one in enumerate(np.eye(3)):
        way = step * (one - mixture) / (1 - mixture[at])
        slopes.append((both.of(mixture + way)[0] - both.of(mixture - way)[0]) / (2 * step))
    ours = calibrated(means, mixture)
    assert ours @ slopes / np.linalg.norm(ours) / np.linalg.norm(slopes) >= 0.95
    assert ours == pytest.approx(slopes, rel=1e-3)
    assert calibrated(means + 7.0, mixture) == pytest.approx(ours)


def test_many_points_are_solved_by_sinkhorn(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = np.array([0.0, 0.5, 0.5])
    both = MixtureDistance(sources(), rows(50, EVEN, 9))
    exact, slopes = both.of(mixture)
    monkeypatch.setattr(distance, "EXACT_POINTS", 10)
    near, other = both.of(mixture)
    assert near == pytest.approx(exact, rel=0.01) and near <= exact
    ours, theirs = (some - some.mean() for some in (slopes, other))
    assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) >= 0.95


def test_sinkhorn_stands_one_point_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "EXACT_POINTS", 10)
    X = np.vstack([np.random.default_rng(0).normal(size=(19, 2)), [[1e5, 0]]])
    weights = np.full(20, 1 / 20)
    assert np.isfinite(transport(weights, weights, euclidean(X, X)).cost)


def test_the_surface_is_least_squares() -> None:
    mixtures, draw = lattice(3, 40), np.random.default_rng(0)
    far = draw.random(len(mixtures)) + 1
    columns = np.hstack([far[:, None] * polynomials(mixtures), polynomials(mixtures)])
    values = columns @ draw.normal(size=12)
    surface = ScoreSurface.fit(mixtures, far, values)
    assert surface.values(mixtures, far) == pytest.approx(values, abs=2e-3)
    at, change = np.array([0.2, 0.5, 0.3]), np.array([0.3, -0.2, 0.5])
    ours, step = surface.gradient(at, 1.3, change), 1e-6
    for way in (np.array([1, -1, 0.0]), np.array([0, 1, -1.0])):
        ends = [
            surface.values((at + s * way)[None], np.array([1.3 + s * way @ change]))[0]
            for s in (step, -step)
        ]
        assert ours @ way == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)


def test_projection_gives_back_both_sizes(fitted: Projektor) -> None:
    low, high = np.array([0.3, 0.1]), np.array([0.5, 0.7])
    assert projected(low, high, (200, 400), 200) == pytest.approx(low, abs=1e-15)
    assert projected(low, high, (200, 400), 400) == pytest.approx(high, abs=1e-15)
    assert projected(low, high, (200, 400), 800) == pytest.approx(2 * high - low)
    for mixture, *scores in zip(fitted.mixtures_, *fitted.scores_, strict=True):
        for size, score in zip(fitted.sizes, scores, strict=True):
            assert fitted.predict(mixture, size) == pytest.approx(score, abs=0.05)


def test_the_best_mixture(fitted: Projektor) -> None:
    best = fitted.best_mixture(500)
    grid = max(fitted.predict(one, 500) for one in fitted.mixtures_)
    assert best.score >= grid - 1e-9
    assert best.score == pytest.approx(fitted.predict(best.mixture, 500))
    some = fitted.best_mixture(500, [50, 400, 400])
    assert some.mixture[0] <= 0.1 + 1e-9 and some.mixture.sum() == pytest.approx(1)
    only = fitted.best_mixture(500, [0, 0, 500])
    assert only.mixture == pytest.approx([0, 0, 1], abs=1e-9)


def test_skewed_sources_are_best_together() -> None:
    projektor = Projektor(
        [rows(80, (0.94, 0.03, 0.03), 3), rows(80, (0.05, 0.5, 0.45), 4)],
        rows(150, EVEN, 9),
        sizes=(40, 80),
        mixtures=12,
        probes=2,
    ).fit()
    best = projektor.best_mixture(160)
    assert 0.15 < best.mixture[0] < 0.85
    assert best.score > max(projektor.predict(one, 160) for one in np.eye(2))


def test_mixtures_and_counts() -> None:
    assert len(lattice(3, 66)) == 66 and len(lattice(2, 12)) == 12
    assert lattice(4, 30).sum(axis=1) == pytest.approx(1)
    assert counts_of(np.array([1 / 3, 1 / 3, 1 / 3]), 100).tolist() == [34, 33, 33]
    assert counts_of(np.array([0.29, 0.71]), 100).tolist() == [29, 71]
    free = np.ones(3)
    assert on_simplex(np.array([0.2, 0.3, 0.5]), free) == pytest.approx([0.2, 0.3, 0.5])
    assert on_simplex(np.array([2.0, 0.1, 0.0]), free) == pytest.approx([1, 0, 0])
    assert on_simplex(np.array([2.0, 0.1, 0.0]), np.array([0.4, 1, 1])) == pytest.approx(
        [0.4, 0.35, 0.25]
    )


def test_a_probe_of_one_class() -> None:
    train = PruneExamples(np.ones((5, 2), np.float32), np.ones(5, np.int64), 3)
    test = PruneExamples(np.ones((4, 2), np.float32), np.array([0, 1, 1, 2]), 3)
    assert linear_probe(train, test) == 0.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sizes": (60, 60)}, "expected 1 or more rows, and then more"),
        ({"sizes": (0, 60)}, "expected 1 or more rows"),
        ({"sizes": (30, 61)}, "source b: 60 rows are revealed"),
        ({"sources": sources()[:1]}, "expected two or more"),
        ({"validation": rows(50, (0.5, 0.5, 0.0), 9).take(np.arange(0))}, "validation"),
    ],
)
def test_bad_input(change: dict[str, object], says: str) -> None:
    values = {"sources": sources(), "validation": rows(50, EVEN, 9), "sizes": (30, 60), **change}
    if "sources" not in change:
        values["sources"] = [rows(100, EVEN, 0), *sources()[1:]]
    with pytest.raises(DataError, match=says) as error:
        Projektor(
            values["sources"], values["validation"], names="abc", sizes=values["sizes"], probe=share
        ).fit()
    assert isinstance(error.value, ConfigError) and "\n" not in str(error.value)


def test_vectors_without_numbers_and_of_other_lengths() -> None:
    some = sources()
    some[1].X[3, 2] = np.nan
    with pytest.raises(DataError, match="source 1: vectors with NaN"):
        Projektor(some, rows(50, EVEN, 9), sizes=(30, 60), probe=share).fit()
    longer = rows(50, EVEN, 9)
    longer = PruneExamples(np.hstack([longer.X, longer.X]), longer.y, 3)
    with pytest.raises(DataError, match="source 0: vectors of 5 numbers"):
        Projektor(sources(), longer, sizes=(30, 60), probe=share).fit()


def test_a_source_without_a_class() -> None:
    some = [*sources()[:2], rows(60, (0.5, 0.5, 0.0), 2)]
    with pytest.raises(DataError, match="source 2: no revealed row is of class 2"):
        Projektor(some, rows(50, EVEN, 9), sizes=(30, 60), probe=share).fit()


@pytest.mark.parametrize(
    "mixture", [(0.5, 0.5), (0.5, 0.6, 0.1), (1.1, -0.1, 0), (np.nan, 0.5, 0.5)]
)
def test_what_is_no_mixture(fitted: Projektor, mixture: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="expected 3 shares, none below 0, with sum 1"):
        fitted.predict(mixture, 100)


@pytest.mark.parametrize("size", [0, -3, np.nan, np.inf])
def test_what_is_no_size(fitted: Projektor, size: float) -> None:
    with pytest.raises(DataError, match="expected a number of rows"):
        fitted.best_mixture(size)


def test_more_than_there_is(fitted: Projektor) -> None:
    with pytest.raises(DataError, match="have 30 rows together"):
        fitted.best_mixture(50, [10, 10, 10])


def test_the_part_refuses_its_sizes() -> None:
    with pytest.raises(ConfigError, match=r"method\.smaller = 400: expected fewer rows"):
        table("curator").build({"name": "projektor", "smaller": 400, "larger": 200})
