"""Causes that are on or off of which in each dimension one alone is seen: the largest.

Combinations are held against the data by compiled code (``kernel.cpp``). A component is estimated
from the dimensions and points in which it is seen; while learning is hot, those that are almost as
large have a share of that.

Source: Luecke, Sahani, Maximal Causes for Non-Linear Component Extraction, 2008 (the weights of
equation 19); Luecke, Eggert, Expectation Truncation, 2010.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from shoal.fields.data.sparse_coding.models.common import (
    TINY,
    estimate_of,
    start_components,
)
from shoal.fields.data.sparse_coding.models.linear import discrete_log_prior, discrete_prior
from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import (
    CodingParams,
    CodingSums,
    CodingWork,
    Floats,
    JointBatch,
)
from shoal.fields.data.sparse_coding.states import StateSpace
from shoal.ir import Estimate, Machine

# Above this temperature the smooth maximum is so flat that components become sums.
_HOTTEST = 1.3


@dataclass(frozen=True)
class MaximalReady:
    """Parameters of a pass.

    Args:
        W: [H, D] components.
        gram: [H, H], their inner products.
        sigma2: variance of the noise.
        log_prior: [M].
        sharpness: rho of the smooth maximum.
    """

    W: Floats
    gram: Floats
    sigma2: float
    log_prior: Floats
    sharpness: float


class MaximalLinear:
    """The models in which one cause wins each dimension."""

    by_magnitude: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    non_negative: ClassVar[bool] = False
    hot: ClassVar[float] = 4.0
    # The lowest temperature of the smooth maximum, and the share of an update that is taken.
    coldest: ClassVar[float] = 1.05
    step: ClassVar[float] = 1.0

    @property
    def values(self) -> tuple[float, ...]:
        """On or off."""
        return (1.0,)

    def estimate(self, work: CodingWork, machine: Machine) -> Estimate:
        """A product with the components, every combination in every dimension, the posteriors."""
        space = StateSpace(work.components, work.candidates, work.active)
        H, D = work.components, work.dim
        cells = space.num_combinations * D + (H * D if self.non_negative else 0)
        seconds = cells * work.rates.cell_s
        return estimate_of(work, space, flops=4.0 * H * D, seconds=seconds, numbers=2 * H * D)

    def candidates(self, work: CodingWork, machine: Machine) -> Iterator[Self]:
        """For data of any sign."""
        yield self

    def check(self, data: Floats) -> None:
        """All data will do."""

    def start(self, mean: Floats, variance: Floats, components: int, seed: int) -> CodingParams:
        """Components around the mean; one cause is active."""
        return {
            "W": self._allowed(start_components(mean, variance, components, seed, apart=1.0)),
            "prior": np.full(1, min(1.0 / components, 0.5)),
            "sigma2": np.asarray(variance.mean()),
        }

    def truth(self, components: Floats, rate: float, sigma: float) -> CodingParams:
        """As it is given."""
        return {
            "W": components,
            "prior": np.full(1, rate),
            "sigma2": np.asarray(sigma**2),
        }

    def rates(self, params: CodingParams) -> Floats:
        """[H]: probability that each cause is active."""
        return np.full(len(params["W"]), params["prior"].sum())

    def ready(self, params: CodingParams, space: StateSpace, temperature: float) -> MaximalReady:
        """Components that the model allows; annealing may have moved them out."""
        W = np.ascontiguousarray(self._allowed(params["W"]))
        # rho = 1 / (1 - 1 / T)
        return MaximalReady(
            W,
            W @ W.T,
            float(params["sigma2"]),
            discrete_log_prior(params["prior"], space),
            1 / (1 - 1 / min(max(temperature, self.coldest), _HOTTEST)),
        )

    def joint(self, data: Floats, ready: MaximalReady, space: StateSpace) -> JointBatch:
        """The error of each state; alone, a cause is seen everywhere."""
        H, first = space.num_components, space.first_combination
        data = np.ascontiguousarray(data)
        p, square = data @ ready.W.T, np.einsum("bd,bd->b", data, data)
        candidates = space.choose(self._scores(data, p, ready))
        error = np.empty((len(data), space.num_states))
        error[:, 0] = square
        error[:, 1 : 1 + H] = square[:, None] - 2 * p + np.diagonal(ready.gram)
        library().max_errors(
            data, ready.W, candidates, *space.places, error[:, first:], self.by_magnitude
        )
        D = data.shape[1]
        logp = error * (-0.5 / ready.sigma2)
        logp += ready.log_prior - 0.5 * D * np.log(2 * np.pi * ready.sigma2)
        return JointBatch(logp, candidates, error)

    def sums(
        self,
        data: Floats,
        posterior: Floats,
        joint: JointBatch,
        ready: MaximalReady,
        space: StateSpace,
    ) -> tuple[CodingSums, Floats]:
        """Of every component and dimension: how often it was seen, and what was seen then."""
        H, first = space.num_components, space.first_combination
        data, single = np.ascontiguousarray(data), posterior[:, 1 : 1 + H]
        weight = posterior.sum(axis=1)
        mixed = single.T @ data
        seen = np.repeat(single.sum(0)[:, None], data.shape[1], axis=1)
        largest = np.abs(ready.W)
        largest /= max(float(largest.max()), np.finfo(float).tiny)
        library().max_sums(
            data,
            largest,
            joint.candidates,
            *space.places,
            np.ascontiguousarray(posterior[:, first:]),
            ready.sharpness,
            mixed,
            seen,
        )
        return {
            "points": np.asarray(weight.sum()),
            "square": np.asarray(weight @ joint.extra[:, 0]),
            "error": np.asarray(np.einsum("bm,bm->", posterior, joint.extra)),
            "mixed": mixed,
            "seen": seen,
            "values": space.value_counts(posterior),
        }, space.means(posterior, joint.candidates)

    def maximize(
        self, sums: CodingSums, params: CodingParams, space: StateSpace, temperature: float
    ) -> CodingParams:
        """What was seen of each component on the mean; what was never seen stays."""
        before = self._allowed(params["W"])
        seen = sums["seen"] > TINY * max(float(sums["points"]), 1.0)
        W = np.where(seen, sums["mixed"] / np.where(seen, sums["seen"], 1.0), before)
        W = self._allowed(before + self.step * (W - before))
        cells = max(float(sums["points"]), 1.0) * W.shape[1]
        least = TINY * float(sums["square"]) / cells
        return {
            "W": W,
            "prior": discrete_prior(sums, params["prior"], space, tied=False),
            "sigma2": np.asarray(max(float(sums["error"]) / cells, least, np.finfo(float).tiny)),
        }

    def sample(
        self, params: CodingParams, num: int, draw: np.random.Generator
    ) -> tuple[Floats, Floats]:
        """Causes by the prior, the largest of them in each dimension, and noise."""
        W = params["W"]
        causes = (draw.random((num, len(W))) < params["prior"][0]).astype(float)
        size = np.abs(W) if self.by_magnitude else W
        mean, most = np.zeros((num, W.shape[1])), np.zeros((num, W.shape[1]))
        for cause, row, large in zip(causes.T, W, size, strict=True):
            wins = (cause[:, None] > 0) & (large > most)
            mean, most = np.where(wins, row, mean), np.where(wins, large, most)
        noise = draw.standard_normal(mean.shape)
        return mean + np.sqrt(float(params["sigma2"])) * noise, causes

    def _allowed(self, W: Floats) -> Floats:
        return np.maximum(W, 0.0) if self.non_negative else W

    def _scores(self, data: Floats, p: Floats, ready: MaximalReady) -> Floats:
        """The normalized inner products."""
        own = np.maximum(np.diagonal(ready.gram), np.finfo(float).tiny)
        return p / np.sqrt(own)
