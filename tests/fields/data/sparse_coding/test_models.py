"""The models: exhaustive EM, principal components, and each other are the oracles."""

from __future__ import annotations

import itertools
import shutil
from math import comb

import numpy as np
import pytest
from exhaustive_causes import discrete_step, slab_step
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.data.sparse_coding.engine import CodingBlocks
from shoal.fields.data.sparse_coding.models import reference
from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import SparseCodeError
from shoal.fields.data.sparse_coding.states import StateSpace, truncated_prior

H, D = 4, 5
DISCRETE = {
    "bsc": ("sum", {}),
    "tsc": ("sum", {"tied": True}),
    "dsc": ("sum", {}),
    "mca": ("max", {"rho": 21.0}),
    "mmca": ("magnitude", {"rho": 35.0, "step": 0.5}),
}


def draw(seed=0):
    return np.random.default_rng(seed)


def problem(name, components=H, points=30, seed=0):
    """A model, parameters of it that are near nothing special, and points."""
    model, d = table("superposition").build(name), draw(seed)
    W = d.normal(size=(components, D)) * 2
    W = np.abs(W) if model.non_negative else W
    params = model.truth(W, 0.3, 0.7)
    if name == "dsc":
        params["prior"] = np.array([0.2, 0.1])
    if name == "gsc":
        root = d.normal(size=(components, components)) / 3
        params["psi"] = np.eye(components) / 4 + root @ root.T
        params["mu"] = d.normal(size=components)
        params["prior"] = d.uniform(0.2, 0.6, components)
    data, _ = model.sample(params, points, d)
    # Not the parameters that the points are from.
    params["W"] = np.abs(W + 0.3) if model.non_negative else W + 0.3
    return model, params, data


def step(model, params, data, space, temperature=1.0):
    (result,) = CodingBlocks(model, space, [data]).expect(params, temperature, [None])
    return result[0], model.maximize(result[1], params, space, temperature)


@pytest.mark.parametrize("name", DISCRETE)
def test_all_states_are_exhaustive_em(name) -> None:
    model, params, data = problem(name)
    space = StateSpace(H, H, H, model.values)
    assert space.num_states == (len(model.values) + 1) ** H
    kind, options = DISCRETE[name]
    evidence, new = step(model, params, data, space)
    wanted, expected = discrete_step(kind, model.values, params, data, **options)
    assert evidence == pytest.approx(wanted, rel=1e-10)
    for key, value in expected.items():
        assert new[key] == pytest.approx(value, rel=1e-6), key


@pytest.mark.parametrize("noise", ["scalar", "diagonal", "full"])
def test_all_states_are_exhaustive_em_of_slabs(noise) -> None:
    _, params, data = problem("gsc", components=3, points=60)
    model = table("superposition").build({"name": "gsc", "noise": noise, "slab": "diagonal"})
    d = draw(1).normal(size=(D, D)) / 4
    params["sigma2"] = {
        "scalar": np.asarray(0.5),
        "diagonal": np.linspace(0.3, 0.8, D),
        "full": np.eye(D) / 2 + d @ d.T,
    }[noise]
    space = StateSpace(3, 3, 3)
    evidence, new = step(model, params, data, space)
    wanted, expected = slab_step(params, data, noise)
    assert evidence == pytest.approx(wanted, rel=1e-10)
    for key, value in expected.items():
        assert new[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def test_slabs_that_are_always_there_are_probabilistic_principal_components() -> None:
    d = draw()
    data, W = d.normal(size=(50, D)) @ d.normal(size=(D, D)), d.normal(size=(3, D))
    model = table("superposition").build("gsc")
    params = model.truth(W, 0.5, 0.6)
    params |= {"prior": np.full(3, 1 - 1e-12), "mu": np.zeros(3), "psi": np.eye(3)}
    evidence, _ = step(model, params, data, StateSpace(3, 3, 3))
    ppca = multivariate_normal(np.zeros(D), W.T @ W + 0.36 * np.eye(D)).logpdf(data)
    assert evidence == pytest.approx(ppca, rel=1e-9)
    sklearn = pytest.importorskip("sklearn.decomposition")
    pca = sklearn.PCA(2).fit(data)
    # Its maximum-likelihood solution has the variance of the first components less the noise.
    loading = pca.components_ * np.sqrt(pca.explained_variance_ - pca.noise_variance_)[:, None]
    params = model.truth(loading, 0.5, np.sqrt(pca.noise_variance_))
    params |= {"prior": np.full(2, 1 - 1e-12), "mu": np.zeros(2), "psi": np.eye(2)}
    evidence, _ = step(model, params, data - pca.mean_, StateSpace(2, 2, 2))
    assert evidence.mean() == pytest.approx(pca.score(data), rel=1e-9)


@pytest.mark.parametrize(("phi", "name"), [((0.0, 1.0), "bsc"), ((-1.0, 0.0, 1.0), "tsc")])
def test_a_discrete_set_is_the_binary_and_the_ternary_model(phi, name) -> None:
    model, params, data = problem(name, components=6)
    space = StateSpace(6, 4, 3, model.values)
    dsc = table("superposition").build({"name": "dsc", "phi": phi})
    other = StateSpace(6, 4, 3, dsc.values)
    evidence, new = step(model, params, data, space)
    same, again = step(dsc, params, data, other)
    assert evidence == pytest.approx(same, rel=1e-12)
    assert new["W"] == pytest.approx(again["W"], rel=1e-9)
    assert new["sigma2"] == pytest.approx(again["sigma2"], rel=1e-9)
    assert new["prior"].sum() == pytest.approx(again["prior"].sum(), rel=1e-9)


def test_maxima_of_disjoint_components_are_their_sums() -> None:
    bsc, mca = (table("superposition").build(name) for name in ("bsc", "mca"))
    W = np.zeros((3, 6))
    W[0, :2], W[1, 2:4], W[2, 4:] = 2.0, [1.0, 3.0], 1.5
    params = bsc.truth(W, 0.3, 0.5)
    data, _ = bsc.sample(params, 40, draw())
    space = StateSpace(3, 3, 3)
    one, after = step(bsc, params, data, space)
    other, again = step(mca, params, data, space)
    assert one == pytest.approx(other, rel=1e-12)
    assert after["prior"] == pytest.approx(again["prior"], rel=1e-9)


@pytest.mark.parametrize("name", [*DISCRETE, "gsc"])
def test_cut_off_states_are_what_the_prior_says(name) -> None:
    """Of few active causes of all components, the evidence is that of a renormalized prior."""
    model, params, data = problem(name)
    whole, part = StateSpace(H, H, H, model.values), StateSpace(H, H, 2, model.values)
    for space in (whole, part):
        ready = model.ready(params, space, 1.0)
        joint = model.joint(data, ready, space)
        if space is whole:
            few = [
                (space.state(at, np.arange(H)) != 0).sum() <= 2 for at in range(space.num_states)
            ]
            wanted = np.sort(joint.logp[:, few], axis=1)
        else:
            mass, _ = truncated_prior(model.rates(params), 2)
            assert np.sort(joint.logp, axis=1) == pytest.approx(wanted - mass, rel=1e-9)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("name", [*DISCRETE, "gsc"])
def test_compiled_functions_are_those_of_numpy(name, monkeypatch) -> None:
    assert library() is not reference, "g++ is there, and nothing was compiled"
    model, params, data = problem(name, components=7)
    space = StateSpace(7, 5, 4, model.values)
    one = step(model, params, data, space, 1.3)
    for module in ("models.linear", "models.maximal", "models.mca", "models.gsc", "states"):
        place = f"shoal.fields.data.sparse_coding.{module}.library"
        monkeypatch.setattr(place, lambda: reference)
    other = step(model, params, data, space, 1.3)
    assert one[0] == pytest.approx(other[0], rel=1e-10)
    for key, value in other[1].items():
        assert one[1][key] == pytest.approx(value, rel=1e-7, abs=1e-10), key


SCORES = st.sampled_from([0.0, -1.5, 2.0, np.nan, np.inf, 7e5])


@given(
    scores=st.integers(1, 60).flatmap(
        lambda some: st.lists(
            st.lists(SCORES, min_size=some, max_size=some), min_size=1, max_size=4
        )
    ),
    share=st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_candidates_are_those_of_numpy(scores, share) -> None:
    scores = np.array(scores)
    found = np.empty((len(scores), max(1, int(share * scores.shape[1]))), np.int64)
    wanted = np.empty_like(found)
    library().choose(scores, found)
    reference.choose(scores, wanted)
    assert found.tolist() == wanted.tolist()


@given(
    rows=st.integers(1, 5),
    states=st.integers(1, 70),
    temperature=st.sampled_from([1.0, 1.7, 30.0]),
    scale=st.sampled_from([1e-3, 1.0, 50.0, 1e5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_posteriors_are_those_of_numpy(rows, states, temperature, scale, seed) -> None:
    logp = scale * np.random.default_rng(seed).normal(size=(rows, states))
    found, wanted = logp.copy(), logp.copy()
    evidence, wanted_evidence = np.empty(rows), np.empty(rows)
    library().posteriors(found, temperature, evidence)
    reference.posteriors(wanted, temperature, wanted_evidence)
    assert found == pytest.approx(wanted, rel=1e-12, abs=0)
    assert evidence == pytest.approx(wanted_evidence, rel=1e-14)


@given(
    rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7),
    most=st.integers(1, 7),
)
@settings(max_examples=60, deadline=None)
def test_the_truncated_prior_is_summed_up(rates, most) -> None:
    mass, active = 0.0, np.zeros(len(rates))
    for state in itertools.product((0, 1), repeat=len(rates)):
        if sum(state) <= most:
            chance = np.prod(np.where(state, rates, 1 - np.array(rates)))
            mass += chance
            active += chance * np.array(state)
    log_mass, under = truncated_prior(np.array(rates), most)
    assert np.exp(log_mass) == pytest.approx(mass, rel=1e-9)
    assert under == pytest.approx(active / mass, rel=1e-9)


def test_the_correction_of_one_rate_is_the_papers() -> None:
    pi, some, most = 0.2, 9, 3
    A = sum(comb(some, g) * pi**g * (1 - pi) ** (some - g) for g in range(most + 1))
    B = sum(g * comb(some, g) * pi**g * (1 - pi) ** (some - g) for g in range(most + 1))
    mass, under = truncated_prior(np.full(some, pi), most)
    assert np.exp(mass) == pytest.approx(A)
    assert under.sum() == pytest.approx(B / A)


@given(
    components=st.integers(1, 6),
    candidates=st.integers(1, 6),
    active=st.integers(1, 6),
    values=st.sampled_from([(1.0,), (1.0, -1.0), (1.0, 2.0)]),
)
@settings(max_examples=40, deadline=None)
def test_states_are_all_different_and_counted(components, candidates, active, values) -> None:
    if not active <= candidates <= components:
        with pytest.raises(SparseCodeError, match="expected 1 to"):
            StateSpace(components, candidates, active, values)
        return
    space = StateSpace(components, candidates, active, values)
    mine = np.sort(draw(3).choice(components, candidates, replace=False))
    states = [tuple(space.state(at, mine)) for at in range(space.num_states)]
    assert len(set(states)) == len(states)
    assert max(np.count_nonzero(state) for state in states) == active
    posterior = draw(4).dirichlet(np.ones(space.num_states), 3)
    wanted = posterior @ np.array(states)
    assert space.means(posterior, np.tile(mine, (3, 1))) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: StateSpace(8, 9, 2), "candidates = 9: expected 1 to 8"),
        (lambda: StateSpace(8, 4, 5), "active = 5: expected 1 to 4"),
        (lambda: StateSpace(40, 40, 12), "combinations of up to 12 of 40"),
        (lambda: table("superposition").build({"name": "dsc", "phi": [1.0, 2.0]}), "with 0 among"),
        (lambda: table("superposition").build({"name": "dsc", "phi": [0.0]}), "and another"),
    ],
)
def test_what_cannot_be(build, said) -> None:
    with pytest.raises(ConfigError, match=said):
        build()


def test_negative_data_have_a_model_of_their_own() -> None:
    data = draw().normal(size=(10, 3))
    with pytest.raises(SparseCodeError, match=r"mca: Negative values.*use mmca"):
        table("superposition").build("mca").check(data)
    for name in ("bsc", "mmca", "gsc"):
        table("superposition").build(name).check(data)
