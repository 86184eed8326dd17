"""What the compiled functions of the models compute, in numpy: the oracle, and the fallback.

Shapes: as in ``protocols.py``; ``sizes`` [K] and ``which`` [K, gamma] are those of
:attr:`~shoal.fields.data.sparse_coding.states.StateSpace.places`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal.fields.data.sparse_coding.protocols import CauseTree, Floats, Ids

Ints = npt.NDArray[np.int32]


UNLIKELY = -80.0
"""Log of the least share of a state in the posterior of a point: numbers below what a float64 holds
in full make every product with them slow."""


def posteriors(logp: Floats, temperature: float, evidence: Floats) -> None:
    """Log likelihoods of points, and probabilities of their states at a temperature.

    Args:
        logp: [B, M], log of the joint probabilities; receives the posteriors.
        temperature: of the posteriors.
        evidence: [B], receives the log likelihoods.
    """
    most = logp.max(axis=1, keepdims=True)
    logp -= most
    np.maximum(logp, UNLIKELY * temperature, out=logp)
    evidence[:] = most[:, 0] + np.log(np.exp(logp).sum(axis=1))
    logp /= temperature
    np.exp(logp, out=logp)
    logp /= logp.sum(axis=1, keepdims=True)


def choose(scores: Floats, out: Ids) -> None:
    """The components with the greatest scores, ascending; of equal ones those that come first.

    Args:
        scores: [B, H].
        out: [B, H'], receives them.
    """
    least = np.where(np.isnan(scores), -np.inf, scores)
    out[:] = np.sort(np.argsort(-least, axis=1, kind="stable")[:, : out.shape[1]], axis=1)


def sum_errors(
    p: Floats,
    gram: Floats,
    values: Floats,
    candidates: Ids,
    tree: CauseTree,
    scale: float,
    base: Floats,
    log_prior: Floats,
    out: Floats,
) -> None:
    """Log joint probabilities of points and states whose components are added up.

    Args:
        p: [B, H], inner products of points and components.
        gram: [H, H], of the components.
        values: [m], of a cause beside 0.
        candidates: [B, H'], ascending.
        tree: the combinations.
        scale: of half the error that a state takes off: one over the variance of the noise.
        base: [B], log density of each point without causes.
        log_prior: [M].
        out: [B, M], receives them.
    """
    H, first = len(gram), 1 + len(values) * len(gram)
    out[:, 0] = 0.0
    for at, v in enumerate(values):
        out[:, 1 + at * H : 1 + (at + 1) * H] = v * p - 0.5 * v * v * np.diagonal(gram)
    near = np.take_along_axis(p, candidates, axis=1)
    inner = gram[candidates[:, :, None], candidates[:, None]]
    states = _states(values, candidates.shape[1], tree)
    out[:, first:] = near @ states.T - 0.5 * np.einsum("bij,ki,kj->bk", inner, states, states)
    out *= scale
    out += log_prior + base[:, None]


def sum_moments(
    values: Floats,
    candidates: Ids,
    tree: CauseTree,
    posterior: Floats,
    means: Floats,
    second: Floats,
    counts: Floats,
    weights: Floats,
) -> None:
    """First and second moments of causes with few values.

    Args:
        values: [m], of a cause beside 0.
        candidates: [B, H'], ascending.
        tree: the combinations.
        posterior: [B, M].
        means: [B, H], zeros, receives the expected causes.
        second: [H, H], zeros, receives their second moments, summed over the points.
        counts: [m], zeros, receives how often each value is expected.
        weights: [B], receives the sums of the rows of the posterior.
    """
    H, first = len(second), 1 + len(values) * len(second)
    single = posterior[:, 1:first].reshape(len(posterior), -1, H)
    states = _states(values, candidates.shape[1], tree)
    combined = posterior[:, first:]
    means += np.einsum("bvh,v->bh", single, values)
    means[np.arange(len(means))[:, None], candidates] += combined @ states
    second += np.diag(np.einsum("bvh,v->h", single, np.square(values)))
    products = np.einsum("bk,ki,kj->bij", combined, states, states)
    np.add.at(second, (candidates[:, :, None], candidates[:, None]), products)
    occurs = np.stack([(states == v).sum(1) for v in values], axis=1)
    counts += single.sum((0, 2)) + combined.sum(0) @ occurs
    weights[:] = posterior.sum(1)


def _states(values: Floats, some: int, tree: CauseTree) -> Floats:
    """[K, H']: value of each candidate in each combination."""
    states = np.zeros((len(tree.sizes), some))
    for row, size, places, worth in zip(states, tree.sizes, tree.which, tree.worth, strict=True):
        row[places[:size]] = values[worth[:size]]
    return states


def overshoot(data: Floats, W: Floats, out: Floats) -> None:
    """How much of each component lies above each point.

    Args:
        data: [B, D].
        W: [H, D].
        out: [B, H], receives it.
    """
    for h, row in enumerate(W):
        out[:, h] = np.maximum(row - data, 0.0).sum(1)


def max_errors(
    data: Floats,
    W: Floats,
    candidates: Ids,
    sizes: Ints,
    which: Ints,
    out: Floats,
    by_magnitude: bool,
) -> None:
    """Square of what the largest of some components leaves of a point.

    Args:
        data: [B, D].
        W: [H, D].
        candidates: [B, H'].
        sizes: [K], components of each combination.
        which: [K, gamma], places among the candidates.
        out: [B, K], receives it.
        by_magnitude: the largest without its sign is seen.
    """
    for k, (size, places) in enumerate(zip(sizes, which, strict=True)):
        rows = W[candidates[:, places[:size]]]
        keys = np.abs(rows) if by_magnitude else rows
        best = np.take_along_axis(rows, keys.argmax(axis=1)[:, None], axis=1)[:, 0]
        out[:, k] = np.square(data - best).sum(1)


def max_sums(
    data: Floats,
    largest: Floats,
    candidates: Ids,
    sizes: Ints,
    which: Ints,
    posterior: Floats,
    sharpness: float,
    mixed: Floats,
    seen: Floats,
) -> None:
    """How far each component is seen in each dimension, and the data where it is.

    A component h is seen in a combination by (w_h / (sum w^rho)^(1/rho))^(rho - 1), the derivative
    of the smooth maximum.

    Args:
        data: [B, D].
        largest: [H, D], magnitudes of the components, at most 1.
        candidates: [B, H'].
        sizes: [K], components of each combination.
        which: [K, gamma], places among the candidates.
        posterior: [B, K].
        sharpness: rho.
        mixed: [H, D], the weighted data are added to it.
        seen: [H, D], the weights are added to it.
    """
    tiny = np.finfo(float).tiny
    for k, (size, places) in enumerate(zip(sizes, which, strict=True)):
        chosen = candidates[:, places[:size]]
        rows = largest[chosen]
        total = np.maximum((rows**sharpness).sum(1), tiny) ** (1 / sharpness - 1)
        weight = rows ** (sharpness - 1) * total[:, None] * posterior[:, k, None, None]
        np.add.at(seen, chosen, weight)
        np.add.at(mixed, chosen, weight * data[:, None])


def slab_errors(
    p: Floats,
    square: Floats,
    gram: Floats,
    mu: Floats,
    psi: Floats,
    candidates: Ids,
    sizes: Ints,
    which: Ints,
    out: Floats,
) -> None:
    """Minus two times the log density of points under combinations, without its constants.

    Data and components are already divided by the deviation of the noise.

    Args:
        p: [B, H], inner products of points and components.
        square: [B], of the points with themselves.
        gram: [H, H], of the components.
        mu: [H], means of the slabs.
        psi: [H, H], their covariance.
        candidates: [B, H'].
        sizes: [K], components of each combination.
        which: [K, gamma], places among the candidates.
        out: [B, K], receives it.
    """
    for k, (size, places) in enumerate(zip(sizes, which, strict=True)):
        chosen = candidates[:, places[:size]]
        G, P = (x[chosen[:, :, None], chosen[:, None]] for x in (gram, psi))
        mean, shift = mu[chosen], p[:, :][np.arange(len(p))[:, None], chosen]
        left = shift - np.einsum("bij,bj->bi", G, mean)
        error = square - np.einsum("bi,bi->b", mean, shift + left)
        precision = G + np.linalg.inv(P)
        gain = np.einsum("bi,bi->b", left, np.linalg.solve(precision, left[:, :, None])[:, :, 0])
        logs = np.linalg.slogdet(P)[1] + np.linalg.slogdet(precision)[1]
        out[:, k] = error - gain + logs


def slab_sums(
    p: Floats,
    gram: Floats,
    mu: Floats,
    psi: Floats,
    candidates: Ids,
    sizes: Ints,
    which: Ints,
    posterior: Floats,
    means: Floats,
    moments: Floats,
    both: Floats,
) -> None:
    """Moments of the causes over all combinations.

    Args:
        p: [B, H]; as the next of :func:`slab_errors`.
        gram: [H, H].
        mu: [H].
        psi: [H, H].
        candidates: [B, H'].
        sizes: [K], components of each combination.
        which: [K, gamma], places among the candidates.
        posterior: [B, K].
        means: [B, H], the expected causes are added to it.
        moments: [H, H], their second moments are added to it.
        both: [H, H], how often two causes are active together is added to it.
    """
    rows = np.arange(len(p))[:, None]
    for k, (size, places) in enumerate(zip(sizes, which, strict=True)):
        chosen = candidates[:, places[:size]]
        G, P = (x[chosen[:, :, None], chosen[:, None]] for x in (gram, psi))
        left = p[rows, chosen] - np.einsum("bij,bj->bi", G, mu[chosen])
        cov = np.linalg.inv(G + np.linalg.inv(P))
        kappa = mu[chosen] + np.einsum("bij,bj->bi", cov, left)
        q = posterior[:, k]
        means[rows, chosen] += q[:, None] * kappa
        pairs = (chosen[:, :, None], chosen[:, None])
        second = cov + kappa[:, :, None] * kappa[:, None]
        np.add.at(moments, pairs, q[:, None, None] * second)
        np.add.at(both, pairs, np.broadcast_to(q[:, None, None], second.shape))
