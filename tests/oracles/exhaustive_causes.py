"""One step of expectation and maximization over all states of all causes, point by point."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.stats import multivariate_normal


def all_states(H, values):
    return np.array(list(itertools.product((0.0, *values), repeat=H)))


def mean_of(kind, state, W):
    """What is seen of a state without noise."""
    if kind == "sum":
        return state @ W
    on = W[state > 0]
    if not len(on):
        return np.zeros(W.shape[1])
    keys = np.abs(on) if kind == "magnitude" else on
    return on[keys.argmax(0), np.arange(W.shape[1])]


def log_joint(kind, states, values, params, y):
    W, prior, var = params["W"], params["prior"], float(params["sigma2"])
    chance = dict(zip((0.0, *values), (1 - prior.sum(), *prior), strict=True))
    result = []
    for state in states:
        log_prior = sum(np.log(chance[s]) for s in state)
        gap = y - mean_of(kind, state, W)
        D = len(y)
        result.append(log_prior - gap @ gap / (2 * var) - 0.5 * D * np.log(2 * np.pi * var))
    return np.array(result)


def softmax(logp):
    top = logp.max()
    q = np.exp(logp - top)
    return q / q.sum(), top + np.log(q.sum())


def discrete_step(kind, values, params, Y, *, tied=False, rho=21.0, step=1.0):
    """Evidence of each point, and the parameters after one step."""
    W = params["W"]
    (H, D), n = W.shape, len(Y)
    states = all_states(H, values)
    evidence, second, mixed = [], np.zeros((H, H)), np.zeros((H, D))
    seen, error, counts = np.zeros((H, D)), 0.0, np.zeros(len(values))
    for y in Y:
        q, log_likelihood = softmax(log_joint(kind, states, values, params, y))
        evidence.append(log_likelihood)
        for chance, state in zip(q, states, strict=True):
            counts += [chance * (state == v).sum() for v in values]
            if kind == "sum":
                second += chance * np.outer(state, state)
                mixed += chance * np.outer(state, y)
                continue
            error += chance * np.square(y - mean_of(kind, state, W)).sum()
            on = np.abs(W) * state[:, None]
            if state.sum() == 1:
                weight = np.repeat(state[:, None], D, axis=1)
            else:
                smooth = np.maximum((on**rho).sum(0), 1e-300) ** (1 / rho)
                weight = (on / smooth) ** (rho - 1)
            seen += chance * weight
            mixed += chance * weight * y
    if kind == "sum":
        new = np.linalg.solve(second, mixed)
        for y in Y:
            q, _ = softmax(log_joint(kind, states, values, params, y))
            error += sum(c * np.square(y - s @ new).sum() for c, s in zip(q, states, strict=True))
    else:
        new = W + step * (mixed / np.where(seen > 0, seen, 1) - W)
    prior = counts / (n * H)
    if tied:
        prior = np.full_like(prior, prior.mean())
    return np.array(evidence), {"W": new, "prior": prior, "sigma2": error / (n * D)}


def slab_step(params, Y, noise_kind):
    """The same for spike-and-slab causes, by Gaussian densities of the size of a point."""
    W, pi, mu, psi = params["W"], params["prior"], params["mu"], params["psi"]
    (H, D), n = W.shape, len(Y)
    noise = params["sigma2"]
    noise = noise if noise.ndim == 2 else np.diag(np.broadcast_to(noise, D))
    states = all_states(H, (1.0,))
    evidence = []
    s1, sz, szsz = np.zeros((H, H)), np.zeros(H), np.zeros((H, H))
    mixed = np.zeros((H, D))
    for y in Y:
        logs, moments = [], []
        for state in states:
            a = state > 0
            cov = noise + W[a].T @ psi[np.ix_(a, a)] @ W[a]
            mean = mu[a] @ W[a]
            prior = np.where(a, np.log(pi), np.log1p(-pi)).sum()
            logs.append(prior + multivariate_normal(mean, cov).logpdf(y))
            gain = psi[np.ix_(a, a)] @ W[a] @ np.linalg.inv(cov)
            kappa, spread = np.zeros(H), np.zeros((H, H))
            kappa[a] = mu[a] + gain @ (y - mean)
            spread[np.ix_(a, a)] = psi[np.ix_(a, a)] - gain @ W[a].T @ psi[np.ix_(a, a)]
            moments.append((kappa, spread + np.outer(kappa, kappa)))
        q, log_likelihood = softmax(np.array(logs))
        evidence.append(log_likelihood)
        for chance, state, (kappa, second) in zip(q, states, moments, strict=True):
            s1 += chance * np.outer(state, state)
            sz += chance * kappa
            szsz += chance * second
            mixed += chance * np.outer(kappa, y)
    new = np.linalg.solve(szsz, mixed)
    left = Y.T @ Y - new.T @ mixed - mixed.T @ new + new.T @ szsz @ new
    by_kind = {"scalar": np.trace(left) / (n * D), "diagonal": np.diag(left) / n, "full": left / n}
    mean = sz / np.diag(s1)
    return np.array(evidence), {
        "W": new,
        "prior": np.diag(s1) / n,
        "mu": mean,
        "psi": np.diag(np.diag(szsz) / np.diag(s1) - mean**2),
        "sigma2": by_kind[noise_kind],
    }
