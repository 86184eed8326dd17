"""Causes with few values whose components are added up, under Gaussian noise of one variance.

The numbers of a point meet the components once: with G = W W' and p = W y, the error of a state is
|y - W's|^2 = |y|^2 - 2 p's + s'G s. Compiled code (``kernel.cpp``) goes from each combination to
those with one cause more, for several points at once.

Shapes: as in ``protocols.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

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


@dataclass(frozen=True)
class LinearReady:
    """Parameters of a pass.

    Args:
        W: [H, D] components.
        gram: [H, H], their inner products.
        sigma2: variance of the noise.
        values: [m], of a cause beside 0.
        log_prior: [M].
    """

    W: Floats
    gram: Floats
    sigma2: float
    values: Floats
    log_prior: Floats


def discrete_log_prior(prior: Floats, space: StateSpace) -> Floats:
    """[M]: log probability of each state under a prior that is cut off at gamma.

    Args:
        prior: [m], probability of each value beside 0.
        space: the states.
    """
    none = max(1.0 - float(prior.sum()), TINY)
    odds = np.log(prior / none)
    mass, _ = truncated_prior(np.full(space.num_components, prior.sum()), space.num_active)
    zero = space.num_components * np.log(none) - mass
    single = np.repeat(odds, space.num_components)
    return np.asarray(zero + np.concatenate([[0.0], single, space.counts @ odds]), np.float64)


def discrete_prior(sums: CodingSums, prior: Floats, space: StateSpace, *, tied: bool) -> Floats:
    """[m]: the prior of the values, corrected for the states that are not looked at.

    Args:
        sums: with ``points`` and ``values``.
        prior: [m], before.
        space: the states.
        tied: all values have the same probability.
    """
    H, rate = space.num_components, float(prior.sum())
    active = float(sums["values"].sum()) / max(float(sums["points"]), 1.0)
    _, under = truncated_prior(np.full(H, rate), space.num_active)
    total = float(rate_of(np.asarray(rate * active / under.sum())))
    share = (sums["values"] + TINY) / (sums["values"] + TINY).sum()
    if tied:
        share = np.full_like(share, 1 / len(share))
    return np.asarray(np.maximum(total * share, TINY), np.float64)


class DiscreteLinear:
    """The models with discrete causes that are added up."""

    tied: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    non_negative: ClassVar[bool] = False
    hot: ClassVar[float] = 2.0
    # How far components begin from the mean, over the deviation of the data.
    apart: ClassVar[float] = 1.0

    @property
    def values(self) -> tuple[float, ...]:
        """On or off."""
        return (1.0,)

    def estimate(self, work: CodingWork, machine: Machine) -> Estimate:
        """Two products with the components; what states take is that of sums and posteriors."""
        space = StateSpace(work.components, work.candidates, work.active, self.values)
        H = work.components
        return estimate_of(work, space, flops=4.0 * H * work.dim, numbers=H * work.dim + H * H)

    def candidates(self, work: CodingWork, machine: Machine) -> Iterator[Self]:
        """For any data."""
        yield self

    def check(self, data: Floats) -> None:
        """All data will do."""

    def start(self, mean: Floats, variance: Floats, components: int, seed: int) -> CodingParams:
        """Components around the mean; one cause is active."""
        m = len(self.values)
        return {
            "W": start_components(mean, variance, components, seed, apart=self.apart),
            "prior": np.full(m, min(1.0 / components, 0.5) / m),
            "sigma2": np.asarray(variance.mean()),
        }

    def truth(self, components: Floats, rate: float, sigma: float) -> CodingParams:
        """All values are as likely."""
        m = len(self.values)
        return {
            "W": components,
            "prior": np.full(m, rate / m),
            "sigma2": np.asarray(sigma**2),
        }

    def rates(self, params: CodingParams) -> Floats:
        """[H]: probability that each cause is active."""
        return np.full(len(params["W"]), params["prior"].sum())

    def ready(self, params: CodingParams, space: StateSpace, temperature: float) -> LinearReady:
        """Inner products of the components."""
        W = params["W"]
        log_prior = discrete_log_prior(params["prior"], space)
        return LinearReady(W, W @ W.T, float(params["sigma2"]), np.asarray(self.values), log_prior)

    def joint(self, data: Floats, ready: LinearReady, space: StateSpace) -> JointBatch:
        """Candidates are the components with the largest normalized inner products."""
        p, own = data @ ready.W.T, np.diagonal(ready.gram)
        signs = {float(np.sign(v)) for v in self.values}
        cosine = p / np.sqrt(np.maximum(own, np.finfo(float).tiny))
        candidates = space.choose(np.abs(cosine) if len(signs) == 2 else cosine * signs.pop())
        square, scale = np.einsum("bd,bd->b", data, data), 1 / ready.sigma2
        base = -0.5 * scale * square - 0.5 * data.shape[1] * np.log(2 * np.pi * ready.sigma2)
        logp, given = np.empty((len(data), space.num_states)), (candidates, space.tree)
        library().sum_errors(
            p, ready.gram, ready.values, *given, scale, base, ready.log_prior, logp
        )
        return JointBatch(logp, candidates, square)

    def sums(
        self,
        data: Floats,
        posterior: Floats,
        joint: JointBatch,
        ready: LinearReady,
        space: StateSpace,
    ) -> tuple[CodingSums, Floats]:
        """First and second moments of the causes."""
        H = space.num_components
        means, second = np.zeros((len(data), H)), np.zeros((H, H))
        counts, weight = np.zeros(len(ready.values)), np.empty(len(data))
        given = (joint.candidates, space.tree, posterior)
        library().sum_moments(ready.values, *given, means, second, counts, weight)
        return {
            "points": np.asarray(weight.sum()),
            "square": np.asarray(weight @ joint.extra),
            "mixed": means.T @ data,
            "second": second,
            "values": counts,
        }, means

    def maximize(
        self, sums: CodingSums, params: CodingParams, space: StateSpace, temperature: float
    ) -> CodingParams:
        """Least squares for the components, and the error that is left for the noise.

        While learning is hot, all values stay as likely: one that fell out would not come back.
        """
        W = least_squares(sums["second"], sums["mixed"], params["W"])
        left = sums["square"] - 2 * np.sum(W * sums["mixed"]) + np.sum((sums["second"] @ W) * W)
        cells = max(float(sums["points"]), 1.0) * W.shape[1]
        least = TINY * float(sums["square"]) / cells
        return {
            "W": W,
            "prior": discrete_prior(
                sums, params["prior"], space, tied=self.tied or temperature > 1
            ),
            "sigma2": np.asarray(max(float(left) / cells, least, np.finfo(float).tiny)),
        }

    def sample(
        self, params: CodingParams, num: int, draw: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Causes by the prior, their sum, and noise."""
        W, prior = params["W"], params["prior"]
        chances = np.concatenate([[1 - prior.sum()], prior])
        which = draw.choice(len(chances), (num, len(W)), p=chances)
        causes = np.concatenate([[0.0], self.values])[which]
        noise = draw.standard_normal((num, W.shape[1]))
        return causes @ W + np.sqrt(float(params["sigma2"])) * noise, causes
