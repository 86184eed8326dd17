"""What claim [26] ProSper does: bars learned and counted, by models and by methods of scikit-learn.

Source: Foeldiak, Forming Sparse Representations by Local Anti-Hebbian Learning, 1990.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from shoal.core.extras import import_extra
from shoal.core.parts import Choice, table
from shoal.corpora.photos import photo_patches
from shoal.fields.data.sparse_coding.engine import (
    CodingState,
    LearningSettings,
    begin,
    learn,
    spread,
)
from shoal.fields.data.sparse_coding.inputs import bars, bars_of
from shoal.fields.data.sparse_coding.models.linear import discrete_log_prior
from shoal.fields.data.sparse_coding.protocols import CodingParams, CodingSums, Floats
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.fields.data.sparse_coding.states import StateSpace

BARS = 16
_PATCHES, _COMPONENTS, _GROUPS = 20_000, 100, 5
# Truth of the data of ``bars_of``.
_RATE, _SIGMA = 2 / 16, 1.0
_OPTIONS: dict[str, dict[str, Any]] = {
    "NMF": {"max_iter": 1000},
    "FastICA": {"max_iter": 1000, "whiten": "unit-variance"},
    "MiniBatchDictionaryLearning": {"batch_size": 256, "fit_algorithm": "cd"},
    "MiniBatchSparsePCA": {"batch_size": 256, "method": "cd"},
}


def bars_data(name: str, points: int, seed: int) -> Floats:
    """Bars of 8 x 8 of a model's own kind."""
    return bars_of(table("superposition").build(name), points, seed=seed)


def learned(
    name: str,
    data: Floats,
    sizes: tuple[int, int, int],
    *,
    seed: int,
    iterations: int = 100,
    restarts: int = 1,
    workers: int = 0,
    seconds: list[float] | None = None,
) -> CodingState:
    """A model learned with the usual annealing.

    Args:
        name: of the model.
        data: [N, D].
        sizes: components, candidates, active causes.
        seed: of learning.
        iterations: how many.
        restarts: starts of which the best is taken.
        workers: processes; 0 for this one.
        seconds: receives the time of each iteration.
    """
    model = table("superposition").build(name)
    space = StateSpace(*sizes, values=model.values)
    schedule = AnnealSchedule.usual(data.shape[1], hot=model.hot)
    settings = LearningSettings(iterations, schedule, seed, float(data.std()), restarts)
    begun = time.perf_counter()

    def tick(state: CodingState) -> None:
        nonlocal begun
        if seconds is not None:
            seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()

    pool = Choice(name="local") if workers else None
    with spread(model, space, data, pool=pool, workers=workers) as (blocks, expect):
        state = begin(model, space, data, settings)
        return learn(model, space, state, settings, blocks, expect, tick)


def bars_learned(name: str, data: Floats, seed: int, restarts: int) -> dict[str, float]:
    """Bars that a model recovers, and the errors of its prior and noise as shares."""
    model = table("superposition").build(name)
    params = learned(name, data, (BARS, 8, 3), seed=seed, restarts=restarts).params
    truth = bars(signed=model.signed)
    return {
        "bars": recovered(params["W"], truth, scaled="mu" in params),
        "prior": abs(float(model.rates(params).mean()) / _RATE - 1),
        "noise": abs(float(np.sqrt(params["sigma2"])) / _SIGMA - 1),
    }


def bars_of_peer(peer: str, name: str, data: Floats, seed: int) -> int:
    """Bars that a method of scikit-learn recovers of a model's data."""
    decomposition: Any = import_extra("sklearn.decomposition", extra="fields", purpose="the peer")
    method = getattr(decomposition, peer)(BARS, random_state=seed, **_OPTIONS[peer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has not converged counts what there is
        method.fit(np.maximum(data, 0.0) if peer == "NMF" else data)
    # The components of ICA unmix; what is mixed are the columns of the other matrix.
    components = getattr(method, "mixing_", method.components_.T).T
    truth = bars(signed=table("superposition").build(name).signed)
    return recovered(components, truth, scaled=True)


def recovered(components: Floats, truth: Floats, *, scaled: bool) -> int:
    """Bars that differ from a component of their own by at most 10 % in the mean.

    Args:
        components: [H, D].
        truth: [B, D].
        scaled: a component may be multiplied by any number, otherwise by 1 or -1.
    """
    inner = components @ truth.T
    length = np.maximum(np.square(components).sum(1), np.finfo(float).tiny)[:, None]
    factor = inner / length if scaled else np.where(inner < 0, -1.0, 1.0)
    gaps = np.abs(factor[:, :, None] * components[:, None] - truth).sum(2)
    near = gaps / np.abs(truth).sum(1) <= 0.1
    rows, columns = linear_sum_assignment(~near)
    return int(near[rows, columns].sum())


def point_by_point(params: CodingParams, data: Floats, space: StateSpace) -> CodingSums:
    """The expectation step of binary sparse coding, one point after the other.

    Args:
        params: of ``bsc``.
        data: [N, D].
        space: the states.
    """
    W, sigma2 = params["W"], float(params["sigma2"])
    H, first, some = space.num_components, space.first_combination, space.num_candidates
    log_prior = discrete_log_prior(params["prior"], space)
    gram, states = W @ W.T, space.combinations
    own, length = np.diagonal(gram), np.sqrt(np.diagonal(gram))
    i, j = np.triu_indices(some)
    products = states[:, i] * states[:, j]
    both = np.where(i == j, -0.5, -1.0) * products
    mixed, second, counts = np.zeros_like(W), np.zeros((H, H)), 0.0
    for y in data:
        p = W @ y
        mine = np.sort(np.argpartition(-p / length, some - 1)[:some])
        logp = np.zeros(space.num_states)
        logp[1:first] = p - 0.5 * own
        logp[first:] = states @ p[mine] + both @ gram[mine[i], mine[j]]
        logp = logp / sigma2 + log_prior
        posterior = np.exp(logp - logp.max())
        posterior /= posterior.sum()
        means = posterior[1:first].copy()
        means[mine] += posterior[first:] @ states
        weights = posterior[first:] @ products
        second[mine[i], mine[j]] += weights
        second[np.arange(H), np.arange(H)] += posterior[1:first]
        mixed += np.outer(means, y)
        counts += means.sum()
    upper = np.triu(second, 1)
    return {"mixed": mixed, "second": second + upper.T, "values": np.asarray([counts])}


def processes_apart() -> float:
    """The largest difference of parameters that two processes and one learn, as a share."""
    data, sizes = bars_data("mca", 1000, 0), (BARS, 8, 3)
    one, two = (learned("mca", data, sizes, seed=0, iterations=20, workers=w) for w in (0, 2))
    return max(
        float(np.abs(two.params[key] - value).max() / np.abs(value).max())
        for key, value in one.params.items()
    )


def patches_s(seed: int) -> list[float]:
    """Seconds of learning all patches, estimated from each fifth of the iterations."""
    seconds: list[float] = []
    learned("gsc", photo_patches(_PATCHES), (_COMPONENTS, 8, 4), seed=seed, seconds=seconds)
    return [float(part.mean()) * len(seconds) for part in np.array_split(seconds, _GROUPS)]
