"""The estimators keep to scikit-learn's conventions, and refuse what cannot be clustered."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import pairwise_distances
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.core.errors import ConfigError
from shoal.fields.data.cluster import FasterCLARA, FasterCLARANS, KMedoids
from shoal.fields.data.cluster.protocols import ClusterError


@pytest.mark.slow
@parametrize_with_checks([KMedoids(), FasterCLARA(), FasterCLARANS()])
def test_conventions(estimator, check) -> None:
    check(estimator)


def vectors(n=60, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 4))


def test_it_clusters_and_predicts() -> None:
    X = vectors()
    model = KMedoids(5, random_state=0).fit(X)
    assert model.inertia_ == pytest.approx(model.transform(X).min(1).sum(), rel=1e-6)
    assert np.array_equal(model.predict(X), model.labels_)
    assert np.array_equal(model.labels_[model.medoid_indices_], np.arange(5))
    assert np.array_equal(model.cluster_centers_, X[model.medoid_indices_])
    assert model.n_swap_ > 0
    assert model.n_iter_ > 1


@pytest.mark.parametrize("estimator", [KMedoids, FasterCLARA, FasterCLARANS])
@pytest.mark.parametrize("metric", ["euclidean", "cosine", "manhattan"])
def test_precomputed_is_the_same(estimator, metric) -> None:
    X = vectors()
    D = pairwise_distances(X, metric=metric)
    one = estimator(5, metric=metric, random_state=0).fit(X)
    other = estimator(5, metric="precomputed", random_state=0).fit(D)
    assert one.medoid_indices_.tolist() == other.medoid_indices_.tolist()
    assert np.array_equal(one.labels_, other.predict(D))
    assert one.inertia_ == pytest.approx(other.inertia_, rel=1e-6)


def test_metrics_of_any_kind() -> None:
    X = vectors()
    named = KMedoids(4, metric="manhattan", random_state=0).fit(X)
    called = KMedoids(4, metric=lambda a, b: np.abs(a - b).sum(), random_state=0).fit(X)
    thin = KMedoids(4, metric="manhattan", random_state=0).fit(sparse.csr_matrix(X))
    for other in (called, thin):
        assert named.medoid_indices_.tolist() == other.medoid_indices_.tolist()


@pytest.mark.parametrize("method", ["fasterpam", "fastpam1", "pam", "alternating"])
def test_methods_and_given_starts(method) -> None:
    X = vectors()
    model = KMedoids(3, method=method, init=[4, 5, 6]).fit(X)
    assert len(set(model.medoid_indices_.tolist())) == 3


@pytest.mark.parametrize(
    ("options", "X", "said"),
    [
        ({"n_clusters": 0}, None, "n_clusters = 0: expected a number from 1 on"),
        ({"n_clusters": 61}, None, "n_clusters = 61: expected 1 to 60"),
        ({"n_clusters": 2.5}, None, "n_clusters = 2.5"),
        ({"metric": "precomputed"}, vectors(), r"shape \(60, 4\): expected a square one"),
        ({"metric": "precomputed"}, np.full((9, 9), np.nan), "row 0 has NaN"),
        ({"metric": "precomputed"}, np.arange(81.0).reshape(9, 9), "not symmetric"),
        ({"metric": "precomputed"}, sparse.eye(9).tocsr(), "a sparse matrix"),
        ({"metric": lambda a, b: 0.0}, sparse.csr_matrix(vectors()), "is given dense rows"),
        ({"metric": "no such"}, None, "metric = 'no such': expected precomputed, or one of"),
        ({"metric": "haversine"}, None, "metric = 'haversine'"),
        ({"method": "clara"}, None, "method = 'clara': expected one of fasterpam"),
        ({"storage": "disk"}, None, "storage = 'disk'"),
        ({"init": "best"}, None, "init = 'best': expected one of random"),
        ({"init": [1, 1], "n_clusters": 2}, None, "2 different objects from 0 to 59"),
        ({"init": [1, 60], "n_clusters": 2}, None, "2 different objects from 0 to 59"),
        ({"max_iter": 0}, None, "max_iter = 0"),
        ({"n_threads": -1}, None, "n_threads = -1"),
    ],
)
def test_bad_input(options, X, said) -> None:
    with pytest.raises(ClusterError, match=said):
        KMedoids(**options).fit(vectors() if X is None else X)


def test_bad_options_of_the_others() -> None:
    with pytest.raises(ConfigError, match=r"method\.clara\.samples"):
        FasterCLARA(n_samples=0).fit(vectors())
    with pytest.raises(ConfigError, match=r"method\.clarans\.patience"):
        FasterCLARANS(patience=0.0).fit(vectors())


def test_too_few_passes_are_a_warning() -> None:
    with pytest.warns(ConvergenceWarning, match="max_iter = 1 passes"):
        KMedoids(8, max_iter=1, random_state=0).fit(vectors(300))
