"""The estimators keep to scikit-learn's conventions."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.core.errors import ConfigError
from shoal.fields.data.prune import DataPruner, PrototypeDifficulty


@pytest.mark.slow
@parametrize_with_checks([DataPruner(), PrototypeDifficulty()])
def test_conventions(estimator, check) -> None:
    check(estimator)


def test_it_keeps_a_share_of_every_class() -> None:
    X, y = load_digits(return_X_y=True)
    names = np.array(list("abcdefghij"))[y]
    model = DataPruner("prototypes", keep=0.3, side="hard", random_state=0).fit(X, names)
    assert len(model.sample_indices_) == round(0.3 * len(X))
    kept = np.bincount(y[model.sample_indices_])
    assert (kept >= 0.15 * np.bincount(y)).all()
    left = np.setdiff1d(np.arange(len(X)), model.sample_indices_)
    assert model.scores_[model.sample_indices_].mean() > model.scores_[left].mean()
    few, classes = DataPruner(keep=0.3, random_state=0).fit_resample(X, y)
    assert len(few) == len(classes) == 539
    el2n = {"name": "el2n", "models": 2, "steps": 20}
    assert DataPruner(el2n, random_state=0).fit(X, y).scores_.max() <= np.sqrt(2)


def test_difficulty_of_new_examples() -> None:
    X, _ = load_digits(return_X_y=True)
    model = PrototypeDifficulty(10, random_state=0).fit(X[:1000])
    assert np.array_equal(model.scores_, model.score_samples(X[:1000]))
    noise = np.random.default_rng(0).uniform(0, 16, size=(100, 64))
    assert model.score_samples(noise).min() > np.median(model.score_samples(X[1000:]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0}, r"keep = 0: expected a number in \(0, 1\]"),
        ({"keep": 1.2}, r"keep = 1.2: expected a number in \(0, 1\]"),
        ({"side": "both"}, "side"),
        ({"floor": 2.0}, "floor"),
        ({"scorer": "best"}, "best"),
        ({"scorer": "el2n"}, "needs classes"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        DataPruner(**options).fit(np.random.default_rng(0).normal(size=(30, 4)))


def test_bad_prototypes() -> None:
    X = np.random.default_rng(0).normal(size=(30, 4))
    with pytest.raises(ConfigError, match="prototypes = 31"):
        PrototypeDifficulty(31).fit(X)
    with pytest.raises(ConfigError, match="metric = 'taxi'"):
        PrototypeDifficulty(metric="taxi").fit(X)
