"""GSC: spike-and-slab causes: whether a cause is active is binary, how much is Gaussian.

Given the active causes everything is Gaussian. With components and data divided by the deviation of
the noise, the slabs of active causes a have the precision W_a W_a' + Psi_a^-1 and a posterior mean
in closed form; nothing of the size of a point is formed for a combination.

Source: Sheikh, Shelton, Luecke, A Truncated EM Approach for Spike-and-Slab Sparse Coding, 2014
(equations 11 to 24).

Differs: the density has the factor 1/2 in its exponent and the noise is estimated from the full
second moment; a covariance of two slabs counts one more observation of 0, so that pairs that were
rarely active together do not spoil the matrix; each cause's rate is corrected for the states that
are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from shoal.core.parts import part
from shoal.fields.data.sparse_coding.models.common import (
    TINY,
    estimate_of,
    least_squares,
    rate_of,
    start_components,
)
from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import (
    CodingParams,
    CodingSums,
    CodingWork,
    Floats,
    JointBatch,
)
from shoal.fields.data.sparse_coding.states import StateSpace, truncated_prior
from shoal.ir import Estimate, Machine

# Eigenvalues of the slabs' correlations stay above it.
_LEAST = 1e-3


@dataclass(frozen=True)
class SlabReady:
    """Parameters of a pass; whitened by the noise.

    Args:
        white: [D, D] or [D] or scalar, what data are multiplied by.
        W: [H, D], components.
        gram: [H, H], their inner products.
        mu: [H], means of the slabs.
        psi: [H, H], covariance of the slabs.
        odds: [H], log odds of a cause.
        constant: log of the probability of no cause, and of what the densities share.
    """

    white: Floats
    W: Floats
    gram: Floats
    mu: Floats
    psi: Floats
    odds: Floats
    constant: float


@part
class SpikeAndSlabCauses:
    """Causes are off, or Gaussian with a mean and variance of their own; components are added up.

    Args:
        noise: its variance: one number, one of each dimension, or a full covariance.
        slab: covariance of the causes: of each alone, or full.
    """

    noise: Literal["scalar", "diagonal", "full"] = "scalar"
    slab: Literal["diagonal", "full"] = "full"

    signed: ClassVar[bool] = False
    non_negative: ClassVar[bool] = False
    hot: ClassVar[float] = 4.0

    @property
    def values(self) -> tuple[float, ...]:
        """On or off; how much is not discrete."""
        return (1.0,)

    def estimate(self, work: CodingWork, machine: Machine) -> Estimate:
        """Products with the components, and a small linear system for every combination."""
        space = StateSpace(work.components, work.candidates, work.active)
        H, D = work.components, work.dim
        extra = 0 if self.noise == "scalar" else 2 * D
        flops = 4.0 * H * D + 2.0 * D * (D if self.noise == "full" else 1) + extra
        seconds = space.num_combinations * work.rates.subset_s
        return estimate_of(work, space, flops=flops, seconds=seconds, numbers=H * D + 2 * H * H)

    def candidates(self, work: CodingWork, machine: Machine) -> Iterator[Self]:
        """For any data, with one variance of the noise."""
        yield self

    def check(self, data: Floats) -> None:
        """All data will do."""

    def start(self, mean: Floats, variance: Floats, components: int, seed: int) -> CodingParams:
        """Slabs around 1 with variance 1; one cause is active."""
        return {
            "W": start_components(mean, variance, components, seed, apart=1.0),
            "prior": np.full(components, min(1.0 / components, 0.5)),
            "mu": np.ones(components),
            "psi": np.eye(components),
            "sigma2": self._noise(np.asarray(variance.mean()), variance),
        }

    def truth(self, components: Floats, rate: float, sigma: float) -> CodingParams:
        """Slabs around 1 with a deviation of a fifth."""
        H, D = components.shape
        variance = np.full(D, sigma**2)
        return {
            "W": components,
            "prior": np.full(H, rate),
            "mu": np.ones(H),
            "psi": 0.04 * np.eye(H),
            "sigma2": self._noise(np.asarray(sigma**2), variance),
        }

    def rates(self, params: CodingParams) -> Floats:
        """[H]: probability that each cause is active."""
        return params["prior"]

    def ready(self, params: CodingParams, space: StateSpace, temperature: float) -> SlabReady:
        """Components and data in units of the noise."""
        W, noise, rates = params["W"], params["sigma2"], params["prior"]
        D = W.shape[1]
        if noise.ndim == 2:
            lower = np.linalg.cholesky(noise)
            white = np.linalg.inv(lower).T
            logs, scaled = 2 * np.log(np.diagonal(lower)).sum(), W @ white
        else:
            white = 1 / np.sqrt(noise)
            logs, scaled = np.log(np.broadcast_to(noise, D)).sum(), W * white
        mass, _ = truncated_prior(rates, space.num_active)
        none = float(np.log1p(-rates).sum()) - mass
        return SlabReady(
            white,
            scaled,
            scaled @ scaled.T,
            np.ascontiguousarray(params["mu"]),
            np.ascontiguousarray(params["psi"]),
            np.log(rates) - np.log1p(-rates),
            none - 0.5 * (D * np.log(2 * np.pi) + float(logs)),
        )

    def joint(self, data: Floats, ready: SlabReady, space: StateSpace) -> JointBatch:
        """Candidates are the causes that explain most alone."""
        H, first = space.num_components, space.first_combination
        white = data @ ready.white if ready.white.ndim == 2 else data * ready.white
        p, square = white @ ready.W.T, np.einsum("bd,bd->b", white, white)
        own, var = np.diagonal(ready.gram), np.diagonal(ready.psi)
        left = p - own * ready.mu
        precision = own + 1 / var
        alone = ready.mu * (p + left) + left**2 / precision
        alone -= np.log(var) + np.log(precision)
        logp = np.empty((len(data), space.num_states))
        logp[:, 0] = -0.5 * square
        logp[:, 1 : 1 + H] = 0.5 * (alone - square[:, None]) + ready.odds
        candidates = space.choose(logp[:, 1 : 1 + H])
        library().slab_errors(
            p,
            square,
            ready.gram,
            ready.mu,
            ready.psi,
            candidates,
            *space.places,
            logp[:, first:],
        )
        logp[:, first:] *= -0.5
        logp[:, first:] += ready.odds[candidates] @ space.combinations.T
        logp += ready.constant
        return JointBatch(logp, candidates, (p, left, precision))

    def sums(
        self,
        data: Floats,
        posterior: Floats,
        joint: JointBatch,
        ready: SlabReady,
        space: StateSpace,
    ) -> tuple[CodingSums, Floats]:
        """First and second moments of the causes, and how often they are active together."""
        H, first = space.num_components, space.first_combination
        p, left, precision = joint.extra
        single = posterior[:, 1 : 1 + H]
        kappa = ready.mu + left / precision
        means = single * kappa
        moments = np.diag(np.einsum("bh,bh->h", single, kappa**2) + single.sum(0) / precision)
        both = np.diag(single.sum(0))
        library().slab_sums(
            p,
            ready.gram,
            ready.mu,
            ready.psi,
            joint.candidates,
            *space.places,
            np.ascontiguousarray(posterior[:, first:]),
            means,
            moments,
            both,
        )
        weighted = data * posterior.sum(axis=1, keepdims=True)
        if self.noise == "full":
            square = weighted.T @ data
        else:
            square = np.einsum("bd,bd->d", weighted, data)
        return {
            "points": np.asarray(posterior.sum()),
            "square": square,
            "mixed": means.T @ data,
            "means": means.sum(0),
            "moments": moments,
            "both": both,
        }, means

    def maximize(
        self, sums: CodingSums, params: CodingParams, space: StateSpace, temperature: float
    ) -> CodingParams:
        """Least squares for the components, moments for slabs and noise."""
        W = least_squares(sums["moments"], sums["mixed"], params["W"])
        points = max(float(sums["points"]), 1.0)
        active = np.diagonal(sums["both"])
        rates = params["prior"]
        _, under = truncated_prior(rates, space.num_active)
        # Of a cause that was hardly active nothing is learned.
        alive = active > TINY * points
        count = np.where(alive, active, 1.0)
        mu = np.where(alive, sums["means"] / count, params["mu"])
        return {
            "W": W,
            "prior": rate_of(rates * (active / points) / np.maximum(under, TINY)),
            "mu": mu,
            "psi": self._covariance(sums, mu, alive, params["psi"]),
            "sigma2": self._left(sums, W, points),
        }

    def sample(
        self, params: CodingParams, num: int, draw: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Spikes by their rates, slabs, their sum, and noise."""
        W, noise = params["W"], params["sigma2"]
        H, D = W.shape
        active = draw.random((num, H)) < params["prior"]
        slabs = params["mu"] + draw.standard_normal((num, H)) @ np.linalg.cholesky(params["psi"]).T
        causes = np.where(active, slabs, 0.0)
        white = draw.standard_normal((num, D))
        spread = white @ np.linalg.cholesky(noise).T if noise.ndim == 2 else white * np.sqrt(noise)
        return causes @ W + spread, causes

    def _noise(self, mean: Floats, variance: Floats) -> Floats:
        by_kind = {"scalar": mean, "diagonal": variance.copy(), "full": np.diag(variance)}
        return by_kind[self.noise]

    def _covariance(
        self, sums: CodingSums, mu: Floats, alive: npt.NDArray[np.bool_], before: Floats
    ) -> Floats:
        """Covariance [H, H] of the slabs of causes that are active together."""
        both, second = sums["both"], sums["moments"] - sums["both"] * np.outer(mu, mu)
        count = np.where(alive, np.diagonal(both), 1.0)
        variance = np.where(alive, np.diagonal(second) / count, np.diagonal(before))
        variance = np.maximum(variance, TINY + _LEAST * TINY * mu**2)
        if self.slab == "diagonal":
            return np.diag(variance)
        deviation = np.sqrt(variance)
        correlation = second / (both + 1) / np.outer(deviation, deviation)
        np.fill_diagonal(correlation, 1.0)
        values = np.linalg.eigvalsh(correlation)
        if values[0] < _LEAST:  # the mean with no correlation at all
            share = (_LEAST - values[0]) / (1 - values[0])
            correlation = (1 - share) * correlation + share * np.eye(len(mu))
        return np.asarray(correlation * np.outer(deviation, deviation), np.float64)

    def _left(self, sums: CodingSums, W: Floats, points: float) -> Floats:
        """What the components leave: the variance of the noise."""
        square = sums["square"]  # of the diagonal alone, but of a full covariance
        if self.noise == "full":
            mixed = W.T @ sums["mixed"]
            left = (square - mixed - mixed.T + W.T @ sums["moments"] @ W) / points
            floor = max(TINY * np.trace(square) / points / len(square), np.finfo(float).tiny)
            return np.asarray(left + floor * np.eye(len(left)), np.float64)
        cells = -2 * W * sums["mixed"] + (sums["moments"] @ W) * W
        if self.noise == "diagonal":
            left, each = square + cells.sum(0), points
        else:
            square = np.asarray(square.sum())
            left, each = square + cells.sum(), points * W.shape[1]
        least = np.maximum(TINY * square / each, np.finfo(float).tiny)
        return np.asarray(np.maximum(left / each, least), np.float64)
