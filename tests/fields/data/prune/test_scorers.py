"""Scores: each against its definition, whatever the order of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits
from sklearn.metrics import pairwise_distances

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import table
from shoal.fields.data.prune.protocols import PruneExamples
from shoal.fields.data.prune.scorers.forgetting import ForgettingCount
from shoal.fields.data.prune.scorers.networks import SmallNetworks, standardized
from shoal.fields.data.prune.scorers.prototypes import centroids, nearest_distance
from shoal.fields.data.prune.scorers.subsets import influence, memorization
from shoal.fields.data.prune.scoring import canonical_order, scored

NAMES = list(table("data_scorer"))


def digits(n: int = 150) -> PruneExamples:
    X, y = load_digits(return_X_y=True)
    return PruneExamples(np.asarray(X[:n] / 16, np.float32), np.asarray(y[:n], np.int64), 10)


def scorer(name: str, **options: Any) -> Any:
    return table("data_scorer").build({"name": name, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_scores_move_with_their_rows(name: str) -> None:
    data = digits()
    order = np.random.default_rng(1).permutation(len(data.X))
    one = scored(scorer(name), data, 3)
    other = scored(scorer(name), data.take(order), 3)
    assert np.array_equal(one[order], other)
    assert len(set(one.tolist())) > 3
    assert not np.array_equal(one, scored(scorer(name), data, 4)) or name == "prototypes"


def test_the_order_follows_from_contents_and_classes() -> None:
    data = digits(60)
    order = np.random.default_rng(0).permutation(60)
    again = data.take(order)
    assert np.array_equal(data.X[canonical_order(data)], again.X[canonical_order(again)])
    other = PruneExamples(data.X, (data.labels + 1) % 10, 10)
    assert not np.array_equal(canonical_order(data), canonical_order(other))


def test_hard_examples_are_those_with_wrong_labels() -> None:
    """Every scorer that looks at labels finds most of those that were exchanged."""
    data = digits(400)
    draw = np.random.default_rng(0)
    wrong = draw.choice(400, 20, replace=False)
    y = data.labels.copy()
    y[wrong] = (y[wrong] + draw.integers(1, 10, 20)) % 10
    noisy = PruneExamples(data.X, y, 10)
    for name in ("prototypes", "el2n", "forgetting", "memorization", "disagreement"):
        ranks = scored(scorer(name), noisy, 0).argsort().argsort()
        assert ranks[wrong].mean() > 1.5 * 400 / 2, name


def test_prototypes_by_brute_force() -> None:
    data = digits()
    means = np.stack([data.X[data.labels == c].mean(axis=0) for c in range(10)])
    wanted = np.linalg.norm(data.X - means[data.labels], axis=1)
    assert scored(scorer("prototypes"), data, 0) == pytest.approx(wanted, abs=1e-5)
    middles = centroids(data.X, 7, 0)
    wanted = pairwise_distances(data.X, middles).min(axis=1)
    assert nearest_distance(data.X, middles) == pytest.approx(wanted, abs=1e-5)
    alike = scored(scorer("ssl_prototypes", metric="cosine"), data, 0)
    scaled = PruneExamples(data.X * 3, data.y, 10)
    # Another order of rows, so another start of k-means: the same within its local optima.
    assert (
        np.corrcoef(alike, scored(scorer("ssl_prototypes", metric="cosine"), scaled, 0))[0, 1] > 0.8
    )


def test_equal_rows_and_many_prototypes() -> None:
    X = np.repeat(np.eye(3, dtype=np.float32), 10, axis=0)
    assert scored(scorer("ssl_prototypes", prototypes=20), PruneExamples(X), 0).max() < 1e-6
    with pytest.raises(DataError, match="prototypes = 31: expected 1 to 30"):
        scored(scorer("ssl_prototypes", prototypes=31), PruneExamples(X), 0)


def test_gradients_by_differences() -> None:
    data = digits(12)
    networks = SmallNetworks(2, 64, 10, seed=5)
    networks.parameters = [one.astype(np.float64) for one in networks.parameters]  # type: ignore[misc]
    X, y = np.stack([data.X[:6], data.X[6:]]).astype(np.float64), data.labels.reshape(2, 6)

    def loss(model: int) -> float:
        (_, chances), *_ = networks.probabilities(X[model])  # type: ignore[arg-type]
        return -float(np.log(chances[model, np.arange(6), y[model]]).mean())

    gradients, right = networks.gradients(X, y)  # type: ignore[arg-type]
    assert right.shape == (2, 6)
    draw = np.random.default_rng(0)
    for value, gradient in zip(networks.parameters, gradients, strict=True):
        model = int(draw.integers(2))
        for _ in range(5):
            at = (model, *(int(draw.integers(size)) for size in value.shape[1:]))
            before, step = value[at], 1e-5
            value[at] = before + step
            up = loss(model)
            value[at] = before - step
            down = loss(model)
            value[at] = before
            assert gradient[at] == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_networks_learn_and_take_equal_steps() -> None:
    data = digits(1000)
    X = standardized(data.X)
    networks = SmallNetworks(3, 64, 10)
    asked: list[int] = []
    networks.train(
        X, data.labels, steps=300, rows=np.tile(np.arange(700), (3, 1)),
        seen=lambda chosen, right: asked.append(chosen.size),
    )  # fmt: skip
    assert networks.steps == 300
    assert asked == [3 * 64] * 300
    assert networks.right(X[700:], data.labels[700:]).mean() > 0.85


def test_forgetting_counts() -> None:
    count = ForgettingCount(2, 3)
    rows = np.array([[0, 1], [1, 2]])
    for right in ([[1, 0], [1, 1]], [[0, 0], [1, 0]], [[1, 0], [0, 1]], [[0, 0], [1, 0]]):
        count(rows, np.array(right, bool))
    # Model 0: row 0 forgotten twice, row 1 never right, row 2 never asked; model 1: 1 and 2.
    assert count.mean(never=9).tolist() == [(2 + 9) / 2, (9 + 1) / 2, (9 + 2) / 2]


def test_subsets_by_brute_force() -> None:
    draw = np.random.default_rng(0)
    models, n = 12, 9
    saw = (draw.random((models, n)) < 0.6).astype(np.float32)
    saw[:2] = [[1] * n, [0] * n]
    right = (draw.random((models, n)) < 0.5).astype(np.float32)

    def between(i: int, j: int) -> float:
        seen, unseen = saw[:, i] == 1, saw[:, i] == 0
        return float(right[seen, j].mean() - right[unseen, j].mean())

    pairs = np.array([[between(i, j) for j in range(n)] for i in range(n)])
    assert memorization(saw, right) == pytest.approx(np.diag(pairs), abs=1e-6)
    np.fill_diagonal(pairs, 0)
    largest, total = influence(saw, right)
    assert total == pytest.approx(np.abs(pairs).sum(axis=1), abs=1e-5)
    np.fill_diagonal(pairs, -9)
    assert largest == pytest.approx(pairs.max(axis=1), abs=1e-6)


@pytest.mark.parametrize("name", ["margin", "entropy", "disagreement"])
def test_uncertainty_by_its_definition(name: str) -> None:
    data = digits()
    order = canonical_order(data)
    inner = data.take(order)
    part = scorer(name)
    networks = SmallNetworks(part.models, 64, 10, seed=7)
    networks.train(standardized(inner.X), inner.labels, steps=part.steps)
    ((_, chances),) = networks.probabilities(standardized(inner.X))
    p = chances.astype(float).mean(axis=0)

    def entropy(q: Any) -> Any:
        return -(q * np.log(q + 1e-30)).sum(axis=-1)

    two = np.sort(p, axis=1)
    wanted = {
        "margin": two[:, -2] - two[:, -1],
        "entropy": entropy(p),
        "disagreement": entropy(p) - entropy(chances.astype(float)).mean(axis=0),
    }[name]
    assert scored(part, data, 7)[order] == pytest.approx(wanted, abs=1e-6)


def test_what_cannot_be_scored() -> None:
    data = digits(30)
    for name in NAMES:
        if table("data_scorer").load(name).needs_labels:
            with pytest.raises(DataError, match="needs classes; name their column"):
                scored(scorer(name), PruneExamples(data.X), 0)
            with pytest.raises(DataError, match="one class only"):
                scored(scorer(name), PruneExamples(data.X, np.zeros(30, np.int64), 1), 0)
    with pytest.raises(DataError, match="n_samples = 1"):
        scored(scorer("random"), data.take(np.array([0])), 0)
    with pytest.raises(ConfigError, match=r"data_scorer\.memorization\.share = 1"):
        scorer("memorization", share=1.0)
    with pytest.raises(ConfigError, match=r"data_scorer\.el2n\.models = 0"):
        scorer("el2n", models=0)
