import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from shoal.core.errors import DataError, UnknownPartError
from shoal.core.parts import table
from shoal.cost.scaling import LAWS
from shoal.cost.scaling.ask import (
    data_needed,
    fit_best,
)
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import fit
from shoal.cost.scaling.picture import picture

PLANTED = {
    "power": ({"alpha": 5.0, "beta": -0.2}, 2.0 ** np.arange(8, 18)),
    "power_floor": ({"alpha": 5.0, "beta": -0.35, "gamma": 0.1}, 2.0 ** np.arange(8, 20)),
    "size": ({"sigma": 3.0, "beta_p": 0.7}, 2.0 ** np.arange(8, 18)),
    "three_regime": (
        {"epsilon0": 4.0, "m0": 2e3, "beta": -0.4, "kappa": 0.5, "gamma": 0.3},
        2.0 ** np.arange(6, 24),
    ),
}


def points(law, values, sizes, noise=0.0, seed=0):
    part = table("law").build(law)
    clean = part.log_value(part.theta(values)[None], np.asarray(sizes)[:, None])[0]
    random = np.random.default_rng(seed)
    noisy = np.exp(clean + noise * random.standard_normal(len(clean)))
    return [CurvePoint(size=m, value=v) for m, v in zip(sizes, noisy, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("law", PLANTED)
def test_planted_parameters_lie_in_the_interval(law):
    values, sizes = PLANTED[law]
    trials = 200
    inside = dict.fromkeys(values, 0)
    for seed in range(trials):
        result = fit(law, points(law, values, sizes, 0.02, seed), seed=seed, replicates=120)
        for name, true in values.items():
            inside[name] += result.parameters[name].low <= true <= result.parameters[name].high
    assert min(inside.values()) >= 0.9 * trials, inside


@pytest.mark.parametrize("law", PLANTED)
def test_exact_curves_give_exact_parameters(law):
    values, sizes = PLANTED[law]
    result = fit(law, points(law, values, sizes), replicates=0)
    for name, true in values.items():
        assert result.parameters[name].value == pytest.approx(true, rel=1e-2), name
    assert result.r2 > 0.999999


def test_joint_law():
    true = {"E": 1.7, "A": 400.0, "a": 0.34, "B": 410.0, "b": 0.28}
    law = table("law").build("joint")
    grid = [(n, d) for n in np.geomspace(1e6, 1e10, 6) for d in np.geomspace(1e8, 1e12, 6)]
    logs = law.log_value(law.theta(true)[None], np.array(grid))[0]
    result = fit(
        "joint",
        [
            CurvePoint(model=n, size=d, value=float(np.exp(v)))
            for (n, d), v in zip(grid, logs, strict=True)
        ],
    )
    for name, value in true.items():
        assert result.parameters[name].value == pytest.approx(value, rel=0.02)
    there = result.predict(1e12, model=1e10)
    assert there.value == pytest.approx(1.7 + 400 / 1e10**0.34 + 410 / 1e12**0.28, rel=1e-3)


def test_the_same_points_give_the_same_intervals():
    curve = points("power", *PLANTED["power"], noise=0.05)
    assert fit("power", curve, seed=3) == fit("power", curve, seed=3)
    assert fit("power", curve, seed=3).parameters != fit("power", curve, seed=4).parameters


@pytest.mark.parametrize(
    "law", ["power", "power_floor", pytest.param("three_regime", marks=pytest.mark.slow)]
)
def test_the_best_law_is_the_one_that_made_the_curve(law):
    curve = points(law, *PLANTED[law], noise=0.005, seed=1)
    assert fit_best(curve).law.name == law


def test_data_needed_inverts_the_law():
    curve = points("power", {"alpha": 5.0, "beta": -0.2}, 2.0 ** np.arange(8, 18), 0.01)
    result = fit("power", curve)
    need = data_needed(result, 0.3)
    assert need is not None and 5 * need.value**-0.2 == pytest.approx(0.3, rel=0.05)
    assert need.low < (0.3 / 5) ** -5 < need.high
    floor = fit("power_floor", points("power_floor", *PLANTED["power_floor"]))
    assert data_needed(floor, 0.05) is None
    with pytest.raises(DataError, match="target"):
        data_needed(result, 0.0)


def learner(rate):
    """Excess risks of learners whose rates are theorems, averaged over many runs."""
    random = np.random.default_rng(0)
    curve = []
    for m in 2 ** np.arange(4, 12):
        if rate == "mean":  # squared error of a mean: 1 / m
            errors = random.standard_normal((20000, 1))[:, 0] ** 2 / m
        elif rate == "coin":  # absolute error of a counted frequency: m ** -0.5
            errors = np.abs(random.binomial(m, 0.3, 20000) / m - 0.3)
        else:  # distance to the nearest of m neighbours in a d-dimensional torus: m ** (-1/d)
            d = int(rate)
            seen = random.random((60, m, d))
            gap = np.abs(seen - 0.5)
            errors = np.sqrt((np.minimum(gap, 1 - gap) ** 2).sum(-1)).min(-1)
            errors = np.concatenate(
                [
                    errors,
                    *(
                        np.sqrt(((random.random((60, m, d)) - 0.5) ** 2).sum(-1)).min(-1)
                        for _ in range(20)
                    ),
                ]
            )
        curve.append(CurvePoint(size=float(m), value=float(errors.mean())))
    return fit("power", curve).parameters["beta"].value


@pytest.mark.parametrize(("rate", "exponent"), [("mean", -1.0), ("coin", -0.5), ("2", -0.5)])
def test_learners_with_known_rates(rate, exponent):
    assert learner(rate) == pytest.approx(exponent, abs=0.05)


def test_bad_curves():
    good = points("power", *PLANTED["power"])
    with pytest.raises(DataError, match="at least 4 points"):
        fit("power", good[:3])
    with pytest.raises(DataError, match="different sizes"):
        fit("power", [good[0]] * 5)
    with pytest.raises(DataError, match="growing"):
        fit("power", [p.model_copy(update={"value": 1 / p.value}) for p in good])
    with pytest.raises(DataError, match="one metric"):
        fit("power", [good[0].model_copy(update={"metric": "bits"}), *good[1:]])
    with pytest.raises(DataError, match="finite"):
        fit("power", [good[0].model_copy(update={"value": float("nan")}), *good[1:]])
    with pytest.raises(DataError, match="trials"):
        fit("power", [*good[:-1], good[-1].model_copy(update={"value": 0.0})])
    with pytest.raises(DataError, match="at least 7"):
        fit("three_regime", good[:6])
    with pytest.raises(UnknownPartError, match="power_floor"):
        fit("power_flor", good)


def test_zero_errors_of_known_trials_are_corrected():
    rates = [0.2, 0.1, 0.05, 0.02, 0.0]
    curve = [CurvePoint(size=4.0**i, value=r, trials=200) for i, r in enumerate(rates, 2)]
    result = fit("power", curve)
    assert result.parameters["beta"].value < -0.2


def test_picture_is_xml_with_words():
    curve = points("power", *PLANTED["power"], noise=0.02)
    root = ElementTree.fromstring(picture({"a": (curve, fit("power", curve)), "b": (curve, None)}))
    tags = [child.tag.split("}")[1] for child in root]
    assert tags[:2] == ["title", "desc"]
    assert "beta -0.2" in (root[1].text or "")


def test_the_table_of_laws():
    assert list(LAWS) == ["power", "power_floor", "three_regime", "size", "joint"]
