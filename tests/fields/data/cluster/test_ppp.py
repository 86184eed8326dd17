"""PPP: the same clusters from every seed and order; posteriors of scikit-learn; bad input; runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")

import pyarrow.parquet as pq
from sklearn.cluster import KMeans
from sklearn.datasets import load_iris, load_wine
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import scale
from sklearn.utils.estimator_checks import parametrize_with_checks

from own_home import own_home
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.fields.data.cluster import PPP
from shoal.fields.data.cluster.job import ClusterJob
from shoal.fields.data.cluster.kind import ClusterKind
from shoal.fields.data.cluster.ppp.agreement import adjusted_rand, mean_adjusted_rand
from shoal.fields.data.cluster.ppp.costs import rates_of, timed
from shoal.fields.data.cluster.ppp.lloyd import improved, lloyd, restarts_of
from shoal.fields.data.cluster.ppp.mixture import FORMS, fit_mixture
from shoal.fields.data.cluster.ppp.points import WeightedPoints, canonical, micro_clusters
from shoal.fields.data.cluster.protocols import ClusterError
from shoal.machine import load


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:k_max = 20")  # the checks' sets are small
@parametrize_with_checks([PPP()])
def test_conventions(estimator, check) -> None:
    check(estimator)


def blobs(sizes=(40, 60, 90), dim=2, seed=0):
    draw = np.random.default_rng(seed)
    centres = np.eye(len(sizes), dim) * 12 + np.arange(len(sizes))[:, None] * 9
    y = np.repeat(np.arange(len(sizes)), sizes)
    return centres[y] + draw.normal(size=(len(y), dim)), y


def test_labels_are_the_same_for_every_seed_and_order() -> None:
    for X in (blobs()[0], scale(load_wine().data), load_iris().data):
        first = PPP(10, random_state=0).fit(X)
        for seed in (1, 2):
            rows = np.random.default_rng(seed).permutation(len(X))
            again = PPP(10, random_state=seed).fit(X[rows])
            assert np.array_equal(again.labels_, first.labels_[rows])
            assert np.array_equal(again.separable_mask_, first.separable_mask_[rows])


def test_it_finds_how_many() -> None:
    X, y = blobs()
    model = PPP(8).fit(X)
    assert model.n_clusters_ == 3
    assert adjusted_rand_score(y, model.labels_) == 1
    assert np.array_equal(model.predict(X), model.labels_)
    assert [*model.cluster_centers_[:, 0]] == sorted(model.cluster_centers_[:, 0])
    assert model.cluster_centers_[0] == pytest.approx(X[y == 1].mean(axis=0), abs=0.1)
    noise = np.random.default_rng(0).uniform(size=(400, 2))
    alone = PPP(8, random_state=3).fit(noise)
    assert alone.n_clusters_ == 1
    assert alone.separable_mask_.all()
    wine = load_wine()
    assert adjusted_rand_score(wine.target, PPP(8).fit(scale(wine.data)).labels_) > 0.9


def test_posteriors_are_those_of_scikit_learn() -> None:
    X = scale(load_wine().data)
    model = PPP(6, random_state=0).fit(X)
    other = GaussianMixture(model.n_clusters_)
    other.weights_, other.means_ = model.weights_, model.means_
    other.precisions_cholesky_ = np.linalg.cholesky(np.linalg.inv(model.covariances_))
    assert model.predict_proba(X) == pytest.approx(other.predict_proba(X), abs=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_are_copies(form) -> None:
    """EM on weighted points is EM on the rows that they stand for."""
    X, y = blobs((20, 30), dim=3)
    weights = np.random.default_rng(1).integers(1, 4, len(X))
    rows = WeightedPoints(np.repeat(X, weights, axis=0), np.ones(weights.sum()))
    few = fit_mixture(WeightedPoints(X, weights.astype(float)), y, steps=4, form=form)
    all_of_them = fit_mixture(rows, np.repeat(y, weights), steps=4, form=form)
    assert few.bic == pytest.approx(all_of_them.bic, rel=1e-9)
    assert few.mixture.covariances == pytest.approx(all_of_them.mixture.covariances)


def test_k_means_is_that_of_scikit_learn() -> None:
    X, _ = blobs()
    X = X - X.mean(axis=0)
    weights = np.random.default_rng(0).integers(1, 4, len(X)).astype(float)
    starts = X[[0, 50, 120, 121]]
    ours = lloyd(WeightedPoints(X, weights), np.stack([starts, starts[::-1]]))
    theirs = KMeans(4, init=starts, n_init=1, tol=0).fit(X, sample_weight=weights)
    assert ours.scatter == pytest.approx([theirs.inertia_] * 2)
    assert np.array_equal(ours.labels[0], theirs.labels_)


def test_moves_only_improve() -> None:
    X = np.random.default_rng(0).uniform(size=(120, 2))
    points = WeightedPoints(X, np.ones(120))
    runs = restarts_of(points, 7, 4, np.random.default_rng(0))
    better = improved(points, runs, 7)
    assert better.scatter.min() <= runs.scatter.min()
    best = better.best
    centres = np.stack([X[best == at].mean(axis=0) for at in range(7)])
    assert better.scatter.min() == pytest.approx(((X - centres[best]) ** 2).sum())


def test_agreement_is_that_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    many = draw.integers(0, 3, (4, 50))
    ones = np.ones(50)
    pairs = [(a, b) for a in range(4) for b in range(a)]
    expected = [adjusted_rand_score(many[a], many[b]) for a, b in pairs]
    assert [adjusted_rand(many[a], many[b], ones) for a, b in pairs] == pytest.approx(expected)
    assert mean_adjusted_rand(many, ones, 3) == pytest.approx(np.mean(expected))


def test_micro_clusters_stand_for_all_rows() -> None:
    X, _ = blobs((300, 500), seed=2)
    rows, weights, place = canonical(np.concatenate([X, X[:100]]))
    assert np.array_equal(rows[place], np.concatenate([X, X[:100]]))
    few, near = micro_clusters(rows, weights, 60)
    assert len(few.weights) <= 60
    assert few.total == 900
    assert few.weights @ few.X == pytest.approx(weights @ rows)
    for at in range(len(few.weights)):
        inside = near == at
        assert few.X[at] == pytest.approx(np.average(rows[inside], axis=0, weights=weights[inside]))


def test_many_rows_are_clustered_through_micro_clusters(monkeypatch) -> None:
    monkeypatch.setattr("shoal.fields.data.cluster.ppp.estimator.MOST_POINTS", 500)
    monkeypatch.setattr("shoal.fields.data.cluster.ppp.estimator.MICRO", 150)
    X, y = blobs((300, 500, 900), seed=2)
    model = PPP(6, random_state=0).fit(X)
    assert model.report_["points"] <= 150
    assert adjusted_rand_score(y, model.labels_) == 1
    assert np.array_equal(PPP(6, random_state=9).fit(X[::-1]).labels_[::-1], model.labels_)


def test_copies_and_constant_columns_change_nothing() -> None:
    X, y = blobs()
    twice = np.concatenate([X, X])
    model = PPP(6, random_state=0).fit(np.column_stack([np.ones(len(twice)), twice]))
    assert model.report_["constant_columns"] == [0]
    assert adjusted_rand_score(np.tile(y, 2), model.labels_) == 1
    assert (model.cluster_centers_[:, 0] == 1).all()
    with pytest.warns(UserWarning, match="no more than 1 clusters are tried, half of the 1 dist"):
        same = PPP().fit(np.full((30, 3), 7.0))
    assert same.n_clusters_ == 1
    assert same.cluster_centers_.tolist() == [[7.0] * 3]
    few = np.repeat([[0.0, 0.0], [5.0, 5.0], [9.0, 0.0]], 20, axis=0)
    with pytest.warns(UserWarning, match="half of the 3 distinct rows"):
        assert PPP().fit(few).n_clusters_ >= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k_max": 0}, "k_max = 0: expected a whole number from 1 on"),
        ({"restarts": 1}, "restarts = 1: expected a whole number from 2 on"),
        ({"tau": 0.0}, r"tau = 0.0: expected a number in \(0, 1\]"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(ClusterError, match=said):
        PPP(**options).fit(blobs()[0])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


@pytest.mark.usefixtures("home")
def test_a_run(tmp_path: Path) -> None:
    X, y = blobs()
    np.save(tmp_path / "vectors.npy", X)
    job = ClusterJob(data=str(tmp_path / "vectors.npy"), k="auto", seed=5)
    (plan,) = ClusterKind().plan(job, load("laptop"))
    assert plan.job.method == Choice(name="ppp")
    assert "excess" not in plan.predicted
    said: list[dict[str, object]] = []
    report = ClusterKind().run(plan, tmp_path / "run", watch=said.append)
    assert report.measured["clusters"] == 3
    assert any("sweep" in str(event) for event in said)
    table = pq.read_table(tmp_path / "run" / "labels.parquet").to_pydict()
    assert adjusted_rand_score(y, table["label"]) == 1
    assert set(table) == {"object", "label", "separable", "distance"}
    centres = json.loads((tmp_path / "run" / "centres.json").read_text())
    assert centres["sizes"] == [60, 40, 90]
    assert [row["k"] for row in centres["report"]["sweep"]] == list(range(2, 21))
    for name in ("sweep.svg", "clusters.svg"):
        assert (tmp_path / "run" / name).read_text().startswith("<svg")
    shown = ClusterKind().results(report, tmp_path / "run")
    assert any("centres.json" in str(line) for line in shown)
    with pytest.raises(ConfigError, match="already contains a run"):
        ClusterKind().run(plan, tmp_path / "run")
    assert ClusterKind().run(plan, tmp_path / "run", resume=True).measured == report.measured
    named = job.model_copy(update={"k": 2, "method": Choice(name="ppp")})
    (two,) = ClusterKind().plan(named, load("laptop"))
    assert ClusterKind().run(two, tmp_path / "two").measured["clusters"] <= 2
    (one,) = ClusterKind().plan(named.model_copy(update={"k": 1}), load("laptop"))
    assert ClusterKind().run(one, tmp_path / "one").measured["clusters"] == 1


@pytest.mark.usefixtures("home")
def test_what_cannot_be(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", blobs()[0])
    job = ClusterJob(data=str(tmp_path / "v.npy"), k="auto")
    medoids = job.model_copy(update={"method": Choice(name="fasterpam")})
    with pytest.raises(ClusterError, match="k = auto: fasterpam needs the number of clusters"):
        ClusterKind().plan(medoids, load("laptop"))
    with pytest.raises(ClusterError, match="k = auto: no method finds it with metric = cosine"):
        ClusterKind().plan(job.model_copy(update={"metric": "cosine"}), load("laptop"))
    cosine = job.model_copy(update={"metric": "cosine", "method": Choice(name="ppp")})
    with pytest.raises(ClusterError, match="method = ppp: it averages vectors in Euclidean space"):
        ClusterKind().plan(cosine, load("laptop"))


def test_rates_are_timed_here_and_derived_elsewhere() -> None:
    here, there = timed(4, rows=200), rates_of(load("laptop"), 4)
    assert here.measured
    assert not there.measured
    for rates in (here, there):
        assert all(
            1e-11 < value < 1e-3 for value in rates.model_dump(exclude={"measured"}).values()
        )


def test_it_warns_of_nothing_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PPP(5).fit(blobs()[0])
