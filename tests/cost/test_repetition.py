"""The law of repeated data: its limits, known parameters found again, and what cannot be fitted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.cost.scaling.repetition import (
    PoolCurve,
    RepetitionLaw,
    fit_pools,
    log_worth,
    log_worth_of_effective,
    log_worth_of_plain,
)

A, D, B, TAU, SIZE = 6.0, 0.4, (-0.35, -0.3, -0.15), (1.5, 3.0, 6.0), 1000
TRUE = RepetitionLaw(SIZE, np.log([A, D, *(-b for b in B), *TAU]), np.empty((0, 8)))


POINTS = 400


def curves(noise: float = 0.01, seed: int = 0) -> list[PoolCurve]:
    draw = np.random.default_rng(seed)
    samples = np.round(np.geomspace(60, 12 * SIZE, POINTS))
    return [
        PoolCurve(
            SIZE, samples, TRUE.errors(samples, [pool]) * np.exp(noise * draw.normal(size=POINTS))
        )
        for pool in range(3)
    ]


def test_one_pass_is_a_power_law() -> None:
    n = np.array([1.0, 10.0, 1000.0])
    assert TRUE.errors(n, [0]) == pytest.approx(A * n ** B[0] + D)


def test_without_decay_repetition_is_as_good_as_new() -> None:
    n = np.array([500.0, 3500.0, 9000.0])
    worth = log_worth(n, SIZE, np.array([-0.3]), np.array([1e12]))
    assert worth == pytest.approx(-0.3 * np.log(n))


def test_the_formula_pass_by_pass() -> None:
    n, product = 3400, A * 1000.0 ** B[1]
    for j, seen in ((2, 2000), (3, 3000), (4, 3400)):
        product *= (seen / min(n, (j - 1) * 1000)) ** (B[1] * 0.5 ** ((j - 1) / TAU[1]))
    assert TRUE.errors(n, [1])[0] == pytest.approx(product + D)
    product = A * 2000.0 ** ((B[0] + B[1]) / 2)
    exponent = sum(B[i] * 0.5 ** (1 / (2 * TAU[i])) for i in (0, 1)) / 2
    assert TRUE.errors(n, [0, 1])[0] == pytest.approx(product * 1.7**exponent + D)


def test_known_parameters_are_found() -> None:
    law = fit_pools(curves())
    assert law.utilities == pytest.approx(B, rel=0.1)
    assert law.half_lives == pytest.approx(TAU, rel=0.1)
    assert law.scale == pytest.approx(A, rel=0.1)
    assert law.floor == pytest.approx(D, rel=0.1)
    interval = law.predict(5000, [0, 1])
    assert interval.low < interval.value < interval.high
    assert float(TRUE.errors(5000, [0, 1])[0]) == pytest.approx(interval.value, rel=0.02)


def test_more_compute_wants_more_pools() -> None:
    choices = TRUE.frontier([300, 4000, 30_000])
    assert [len(choice.pools) for choice in choices] == sorted(len(c.pools) for c in choices)
    assert choices[0].pools == (0,)
    assert len(choices[-1].pools) > 1
    for choice in choices:
        every = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
        best = min(float(TRUE.errors(choice.budget, pools)[0]) for pools in every)
        assert choice.error.value == pytest.approx(best)
    many = RepetitionLaw(
        10, np.log([1, 0.1, *np.linspace(0.5, 0.1, 14), *[2.0] * 14]), np.empty((0, 30))
    )
    assert many.choose(1000).pools == tuple(range(len(many.choose(1000).pools)))


@pytest.mark.slow
def test_simpler_laws() -> None:
    n, b = np.array([400.0, 2000.0, 5000.0]), np.array([-0.3, -0.1])
    for worth in (log_worth_of_effective, log_worth_of_plain):
        assert worth(n, SIZE, b, np.array([1e9, 1e9])) == pytest.approx(-0.2 * np.log(n), rel=1e-6)
    tired = log_worth_of_effective(n, SIZE, b, np.array([1e-9, 1e-9]))
    assert tired == pytest.approx(-0.2 * np.log([400, 2000, 2000]))
    wrong = fit_pools(curves(0.0), form="plain")
    right = fit_pools(curves(0.0))
    at = np.array([6000.0])
    miss = [
        abs(float(law.errors(at, [0, 1])[0] - TRUE.errors(at, [0, 1])[0])) for law in (right, wrong)
    ]
    assert miss[0] < 0.1 * miss[1]


def test_bad_input() -> None:
    good = curves()
    with pytest.raises(ConfigError, match="pools of 500, 1000 examples"):
        fit_pools([good[0], good[1]._replace(size=500)])
    with pytest.raises(ConfigError, match="pools of no examples"):
        fit_pools([])
    early = good[0]._replace(samples=good[0].samples[:150], errors=good[0].errors[:150])
    with pytest.raises(ConfigError, match="pool 0: 0 points past its first pass"):
        fit_pools([early])
    with pytest.raises(ConfigError, match="expected errors above 0"):
        fit_pools([good[0]._replace(errors=good[0].errors - 10)])
    rising = good[1]._replace(errors=np.linspace(1, 2, POINTS))
    with pytest.raises(ConfigError, match=r"pool 1: its error does not fall .* \(b >= 0\)"):
        fit_pools([good[0], rising])
    with pytest.raises(ConfigError, match="budget"):
        TRUE.choose(0)
    assert math.isfinite(TRUE.scale)
