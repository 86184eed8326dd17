"""Extragradient, not compressed: the method that others are compared with.

Source: Korpelevich, The Extragradient Method for Finding Saddle Points, 1976.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from shoal.core.parts import part
from shoal.fields.federate.vi.methods.moments import AdamMoments
from shoal.fields.federate.vi.protocols import Place, Steps, ViCosts, ViWork
from shoal.ir import Machine


@part
class Extragradient:
    """Take a trial step, then step from the old point by the operator at the trial point.

    Args:
        stochastic: evaluate the operator on drawn data.
        adam: scale the operator by Adam's moments; a heuristic for networks.
    """

    stochastic: bool = False
    adam: bool = False

    @classmethod
    def candidates(cls, work: ViWork, machine: Machine) -> Iterator[Self]:
        """For every problem."""
        yield cls()

    def check(self, work: ViWork) -> None:
        """It uses no compressor."""

    def bound(self, work: ViWork) -> float | None:
        """1 / L."""
        return 1 / work.constants.mean_lipschitz if work.constants else None

    def costs(self, work: ViWork, step: float) -> ViCosts:
        """Two whole vectors each way; an iteration takes 1 - gamma mu of the distance."""
        mu = work.constants.monotone if work.constants else 0.0
        return ViCosts(
            iterations=work.log_error / (2 * step * mu) if mu else None,
            up_bits=64.0 * work.size,
            down_bits=64.0 * work.size,
            exchanges=2.0,
            evaluations=2.0,
        )

    def steps(self, place: Place) -> Steps:
        """Two means in each iteration."""
        z = place.operator.start()
        moments = AdamMoments(len(z), used=self.adam)
        while True:
            sample = place.sample(self.stochastic)
            here = yield place.whole(place.value(z, sample))
            half = place.prox(z - place.step * moments.tried(here))
            there = yield place.whole(place.value(half, sample))
            z = place.prox(z - place.step * moments.added(there))
            place.done(z)
