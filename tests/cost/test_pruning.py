"""The theory of pruned data: the paper's equations, known limits, and students really trained."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from shoal.core.errors import ConfigError
from shoal.cost.scaling.pruning import (
    LEAST_KEEP,
    PruneAdvisor,
    best_keep,
    envelope,
    kept_margins,
    max_margin,
    simulated_error,
    student,
)


@pytest.mark.parametrize(
    ("alpha", "keep", "error"), [(2, 1.0, 0.189), (2, 0.6, 0.261), (8, 0.4, 0.062)]
)
def test_known_errors(alpha: float, keep: float, error: float) -> None:
    assert student(alpha, keep).error == pytest.approx(error, abs=6e-4)


def test_all_examples_give_the_classical_curve() -> None:
    """Error falls to 0.5005 / alpha (Gardner and Derrida; Opper et al.)."""
    for alpha in (50.0, 500.0):
        assert alpha * student(alpha).error == pytest.approx(0.5005, abs=1e-3 + 0.2 / alpha)


@pytest.mark.parametrize(("alpha", "keep"), [(0.5, 1.0), (2, 0.6), (8, 0.4), (20, 0.2), (3, 0.9)])
def test_the_equations_of_the_paper(alpha: float, keep: float) -> None:
    """As they are printed, over the student's margin, with another quadrature."""
    R, kappa, *_ = student(alpha, keep)
    gamma, s2 = kept_margins(keep)[1], 1 - R**2
    s, f, kept = math.sqrt(s2), keep, alpha * keep

    def first(t: float) -> float:
        cut = math.exp(-gamma * (gamma - 2 * R * t) / (2 * s2)) if gamma < math.inf else 0.0
        density = math.exp(-(t**2) / 2 - R**2 * t**2 / (2 * s2)) / math.sqrt(2 * math.pi)
        return density * (1 - cut) * (kappa - t)

    def second(t: float) -> float:
        inside = special.ndtr(R * t / s) - special.ndtr(-(gamma - R * t) / s)
        return math.exp(-(t**2) / 2) / math.sqrt(2 * math.pi) * inside * (kappa - t) ** 2

    def integral(of: Any) -> float:
        ends = np.linspace(kappa - 12, kappa, 60)
        pieces = itertools.pairwise(ends)
        return sum(integrate.quad(of, low, high)[0] for low, high in pieces)

    left = 2 * kept / (f * math.sqrt(2 * math.pi * s2)) * integral(first)
    assert left == pytest.approx(R, rel=1e-6)
    assert 2 * kept / f * integral(second) == pytest.approx(s2, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    alpha=st.floats(0.05, 60.0), keep=st.floats(0.05, 1.0), side=st.sampled_from(["hard", "easy"])
)
def test_it_solves_everywhere(alpha: float, keep: float, side: Any) -> None:
    state = student(alpha, keep, side)
    assert state.residual < 1e-8
    assert 0 < state.error < 0.5
    # Fewer hard examples teach less than all. (Easy ones may teach a largest margin more.)
    assert side == "easy" or state.error >= student(alpha).error * (1 - 1e-6)


@pytest.mark.parametrize(
    ("alpha", "keep", "side"),
    [(2, 1.0, "hard"), (2, 0.6, "hard"), (8, 0.4, "hard"), (4, 0.5, "easy")],
)
def test_students_that_are_trained(alpha: float, keep: float, side: Any) -> None:
    errors = [simulated_error(alpha, keep, dim=120, side=side, seed=seed) for seed in range(8)]
    spread = float(np.std(errors, ddof=1)) / math.sqrt(len(errors))
    assert abs(float(np.mean(errors)) - student(alpha, keep, side).error) < 0.01 + 2 * spread


def test_a_bad_probe_ranks_worse() -> None:
    """Hard examples need a good probe; with one at a right angle, they are hard for nobody."""
    good, bad = (
        np.mean([simulated_error(12, 0.2, dim=60, angle=angle, seed=s) for s in range(4)])
        for angle in (0.0, math.pi / 2)
    )
    assert good < bad


def test_largest_margin() -> None:
    """The conditions of the optimum: a combination of its own support vectors, none inside."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(40, 6))
    X *= np.sign(X[:, :1])
    w = max_margin(X)
    products = X @ w
    least = products.min()
    assert least > 0
    support = X[products < least * (1 + 1e-6)]
    weights = np.linalg.lstsq(support.T, w, rcond=None)[0]
    assert support.T @ weights == pytest.approx(w, abs=1e-6)
    assert (weights > 0).all()


@pytest.mark.slow
def test_the_envelope() -> None:
    keep, best = envelope(1.7)
    for other in (keep * 0.9, keep * 1.1):
        assert student(1.7 / other, other).error > best.error
    pool = 1.7 / keep
    assert best_keep(pool) == pytest.approx(keep, rel=0.08)
    assert LEAST_KEEP <= best_keep(20.0) < best_keep(4.0) <= 1.0
    errors = [math.log(envelope(alpha)[1].error) for alpha in (1.6, 4.8)]
    assert (errors[1] - errors[0]) / math.log(3) < -2


def test_advice() -> None:
    few, many = PruneAdvisor(50, 64), PruneAdvisor(6400, 64)
    assert few.advise(0.5).side == "easy"
    assert many.advise(0.5).side == "hard"
    advice = many.advise()
    assert advice.keep < 0.5
    assert advice.error_all <= advice.error < advice.error_random
    assert PruneAdvisor(10**9, 2).advise(0.5) == PruneAdvisor(10**8, 2).advise(0.5)
    assert few.advise().keep > 0.95


def test_bad_input() -> None:
    for keep in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"keep = .*expected a number in \(0, 1\]"):
            student(2.0, keep)
        with pytest.raises(ConfigError, match="keep"):
            PruneAdvisor(10, 2).advise(keep)
    with pytest.raises(ConfigError, match="no interval of margins has so few"):
        kept_margins(1e-17)
    with pytest.raises(ConfigError, match="alpha_total"):
        student(0.0)
    with pytest.raises(ConfigError, match=r"PruneAdvisor\.n"):
        PruneAdvisor(0, 3)
    with pytest.raises(ConfigError, match=r"PruneAdvisor\.d"):
        PruneAdvisor(3, 0)
