"""What the Projektor claim measures: fits with and without transport, mixtures, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.stats import sem

from shoal.claims.experiments.projektor_tasks import MixtureTask
from shoal.core.random import generator
from shoal.fields.data.curate.projektor import Projektor
from shoal.fields.data.curate.projektor.distance import calibrated
from shoal.fields.data.curate.projektor.probes import drawn, linear_probe
from shoal.fields.data.curate.projektor.surface import Floats, polynomials, projected

SIZES, SIZE = (200, 400), 1200
_STEP = 1e-4
# Mixtures that are predicted; models on each of them, and on each of those that are searched.
_HELD, _REPEATS, _SEARCHED = 30, 8, 4


class MixtureFits(NamedTuple):
    """Of one draw: errors of fits, scores of mixtures over the best, cosines of gradients.

    Args:
        errors: at the projected size.
        probed: at the larger size of the probes.
        noise: error that a fit without any would have, because measured scores are means of a few.
    """

    errors: dict[str, float]
    probed: dict[str, float]
    noise: float
    chosen: float
    single: float
    calibrated: Sequence[float]
    potentials: Sequence[float]


def measured_of(task: Callable[[int], MixtureTask], draw: int, quick: bool) -> MixtureFits:
    """Fit, predict, measure.

    Args:
        task: number of a draw -> sources and validation data.
        draw: its number.
        quick: only the gradients, with fewer probes.
    """
    sources, validation = task(draw)
    revealed = [one.take(np.arange(SIZES[1])) for one in sources]
    mixtures, probes = (18, 1) if quick else (66, 4)
    projektor = Projektor(
        revealed, validation, sizes=SIZES, mixtures=mixtures, probes=probes, seed=draw
    ).fit()
    random = generator(draw, purpose="projektor mixtures")
    held_GK = random.dirichlet(np.ones(len(sources)), _HELD)
    with_constant, without = zip(*(cosines_of(projektor, one) for one in held_GK[:5]), strict=True)
    if quick:
        return MixtureFits({}, {}, 0.0, 0.0, 0.0, without, with_constant)

    def scores(mixture_K: Floats, index: int, size: int, repeats: int = _REPEATS) -> Floats:
        sets = generator(draw, purpose="projektor scores", index=index, step=size)
        some = [drawn(sources, mixture_K, size, sets) for _ in range(repeats)]
        return np.array([linear_probe(one, validation) for one in some])

    def errors(size: int) -> tuple[dict[str, float], float]:
        true_GR = np.array([scores(one, at, size) for at, one in enumerate(held_GK)])
        found = {name: fit(projektor, held_GK, size) for name, fit in FITS.items()}
        missed = {n: float(np.abs(one - true_GR.mean(axis=1)).mean()) for n, one in found.items()}
        return missed, float(sem(true_GR, axis=1).mean() * np.sqrt(2 / np.pi))

    projection, noise = errors(SIZE)
    # The best of all mixtures is found by some models, and scored by others.
    tried = [scores(one, 100 + at, SIZE, _SEARCHED) for at, one in enumerate(projektor.mixtures_)]
    half = _SEARCHED // 2
    best = max(tried, key=lambda one: float(one[:half].mean()))[half:].mean()
    at = int(np.argmax([projektor.predict(one, SIZES[1]) for one in np.eye(len(sources))]))
    chosen, single = projektor.best_mixture(SIZE).mixture, np.eye(len(sources))[at]
    return MixtureFits(
        projection,
        errors(SIZES[1])[0],
        noise,
        float(scores(chosen, 1000, SIZE).mean() / best),
        float(scores(single, 1001, SIZE).mean() / best),
        without,
        with_constant,
    )


def profile_of(
    task: str, probed: Sequence[Mapping[str, float]], errors: Mapping[str, Sequence[float]]
) -> str:
    """What of the errors is there before anything is projected.

    Args:
        task: its name.
        probed: of each draw: fit -> error at the larger size of the probes.
        errors: fit -> errors at the projected size.
    """
    said = (
        f"{fit} {np.mean([one[fit] for one in probed]):.4f}, {np.mean(errors[fit]):.4f}"
        for fit in FITS
    )
    return f"{task}, mean errors at {SIZES[1]} and {SIZE} rows: {'; '.join(said)}. "


def cosines_of(projektor: Projektor, mixture_K: Floats) -> tuple[float, float]:
    """Of mean potentials, and of calibrated ones, with finite differences of the distance."""
    means_K = projektor.distance(mixture_K)[1]
    ways = [one - mixture_K for one in np.eye(len(mixture_K))]
    slopes = [
        (
            projektor.distance(mixture_K + _STEP * way)[0]
            - projektor.distance(mixture_K - _STEP * way)[0]
        )
        / (2 * _STEP * (1 - mixture_K[at]))
        for at, way in enumerate(ways)
    ]

    def cosine(some: Floats) -> float:
        return float(some @ slopes / (np.linalg.norm(some) * np.linalg.norm(slopes)))

    return cosine(means_K), cosine(calibrated(means_K, mixture_K))


def _of_mixture(
    columns: Callable[[Floats], Floats], projektor: Projektor, held_GK: Floats, size: int
) -> Floats:
    """Least squares at both sizes, and the same projection."""
    values = projektor.logarithms(projektor.scores_)
    weights = np.linalg.lstsq(columns(projektor.mixtures_), values.T, rcond=None)[0]
    low, high = (columns(held_GK) @ weights).T
    return np.asarray(1 - np.exp(-projected(low, high, SIZES, size)))


def _log_linear(projektor: Projektor, held_GK: Floats, size: int) -> Floats:
    """Least squares in the logarithm of each source's rows."""

    def columns(mixtures_GK: Floats, rows: int) -> Floats:
        return np.column_stack([np.log1p(mixtures_GK * rows), np.ones(len(mixtures_GK))])

    both = np.concatenate([columns(projektor.mixtures_, rows) for rows in SIZES])
    values = projektor.logarithms(projektor.scores_).ravel()
    weights = np.linalg.lstsq(both, values, rcond=None)[0]
    return np.asarray(1 - np.exp(-columns(held_GK, size) @ weights))


def _transport(projektor: Projektor, held_GK: Floats, size: int) -> Floats:
    return np.array([projektor.predict(one, size) for one in held_GK])


BASELINES: dict[str, Callable[[Projektor, Floats, int], Floats]] = {
    "linear": partial(_of_mixture, lambda mixtures_GK: mixtures_GK),
    "pseudo-quadratic": partial(_of_mixture, polynomials),
    "log-linear": _log_linear,
}
"""Name -> (fitted projektor, mixtures, rows) -> scores."""

FITS = {"projektor": _transport, **BASELINES}
"""All of them."""
