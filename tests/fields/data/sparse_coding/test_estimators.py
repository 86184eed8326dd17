"""The estimators keep to scikit-learn's conventions, and refuse what cannot be explained."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.data.sparse_coding import BSC, DSC, GSC, MCA, MMCA, TSC
from shoal.fields.data.sparse_coding.inputs import bars_of
from shoal.fields.data.sparse_coding.protocols import SparseCodeError

ALL = {"bsc": BSC, "tsc": TSC, "dsc": DSC, "mca": MCA, "mmca": MMCA, "gsc": GSC}


@pytest.mark.slow
@parametrize_with_checks([estimator() for estimator in ALL.values()])
def test_conventions(estimator, check) -> None:
    check(estimator)


def data_of(name):
    return bars_of(table("superposition").build(name), 200, edge=4)


@pytest.mark.parametrize("name", ALL)
def test_it_learns_infers_and_samples(name) -> None:
    X = data_of(name)
    model = ALL[name](8, 6, 3, max_iter=20, random_state=0).fit(X)
    assert model.components_.shape == (8, 16)
    assert model.free_energy_.shape == (20,)
    assert model.n_iter_ == 20
    means = model.transform(X)
    assert means.shape == (200, 8)
    states, chances = model.infer(X[:7], top=4)
    assert states.shape == (7, 4, 8)
    assert (np.diff(chances, axis=1) <= 0).all()
    assert (chances.sum(1) <= 1 + 1e-9).all()
    everything, all_chances = model.infer(X[:7], top=10**6)
    assert all_chances.sum(1) == pytest.approx(1.0)
    if name != "gsc":  # its causes are not the states
        expected = np.einsum("nk,nkh->nh", all_chances, everything)
        assert expected == pytest.approx(means[:7], abs=1e-9)
    plain = {"temperature": [[0, 1]], "noise": [[0, 0]], "cut": [[0, 0]]}
    better = ALL[name](8, 8, 3, max_iter=20, schedule=plain, random_state=0).fit(X)
    assert better.score(X) > better.free_energy_[0]
    drawn, causes = model.sample(500)
    assert drawn.shape == (500, 16)
    assert causes.shape == (500, 8)
    rate = np.mean(model.prior_) if name == "gsc" else np.sum(model.prior_)
    assert np.mean(causes != 0) == pytest.approx(rate, abs=0.05)
    again = clone(model).fit(X)
    assert np.array_equal(again.components_, model.components_)


def test_kinds_of_noise() -> None:
    X = data_of("gsc")
    shapes = {"scalar": (), "diagonal": (16,), "full": (16, 16)}
    for noise, shape in shapes.items():
        for slab in ("full", "diagonal"):
            model = GSC(8, 5, 2, noise=noise, slab=slab, max_iter=8, random_state=0).fit(X)
            assert np.shape(model.noise_) == shape


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_components": 0}, "n_components = 0"),
        ({"n_candidates": 17}, "candidates = 17: expected 1 to 16"),
        ({"n_active": 9}, "active = 9: expected 1 to 8"),
        ({"max_iter": 2.5}, r"max_iter = 2\.5"),
        ({"schedule": {"heat": 1}}, "heat"),
    ],
)
def test_bad_options(options, said) -> None:
    with pytest.raises(ConfigError, match=said):
        BSC(**options).fit(data_of("bsc"))


def test_bad_data() -> None:
    X = np.random.default_rng(0).normal(size=(20, 4))
    with pytest.raises(SparseCodeError, match="use mmca"):
        MCA(4, 3, 2).fit(X)
    X[:, 2] = 5.0
    with pytest.raises(SparseCodeError, match="constant columns: 2"):
        BSC(4, 3, 2).fit(X)
    with pytest.raises(ConfigError, match="phi = "):
        DSC(4, 3, 2, phi=(1.0, 2.0)).fit(X)
    with pytest.raises(SparseCodeError, match="top = 0"):
        BSC(4, 3, 2, max_iter=1).fit(np.delete(X, 2, 1)).infer(X[:, :3], top=0)
