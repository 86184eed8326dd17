"""Extragradient whose messages are compressed as they are: a baseline that stalls.

Where workers differ, F_m is not zero at the solution, and neither is the error of compressing it.

Source: Beznosikov et al., Distributed Methods with Compressed Communication for Solving
Variational Inequalities, with Theoretical Guarantees, 2022 (as a baseline).
"""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.vi.protocols import MeanExchange, Place, Steps, ViCosts, ViWork


@part
class CompressedExtragradient:
    """Extragradient in which every message is compressed, without a reference point.

    Never proposed: it does not reach a solution.

    Args:
        feedback: add what compression has left out to the next message.
    """

    feedback: bool = False

    def check(self, work: ViWork) -> None:
        """Any compressor."""

    def bound(self, work: ViWork) -> float | None:
        """That of extragradient, which it has no theory for."""
        return 1 / work.constants.mean_lipschitz if work.constants else None

    def costs(self, work: ViWork, step: float) -> ViCosts:
        """Two compressed vectors each way."""
        return ViCosts(
            iterations=None,
            up_bits=2.0 * work.up.bits(work.size),
            down_bits=2.0 * work.down.bits(work.size),
            exchanges=2.0,
            evaluations=2.0,
        )

    def steps(self, place: Place) -> Steps:
        """As extragradient."""
        z = place.operator.start()
        while True:
            half = place.prox(z - place.step * (yield self._sent(place, z)))
            z = place.prox(z - place.step * (yield self._sent(place, half)))
            place.done(z)

    def _sent(self, place: Place, z: np.ndarray) -> MeanExchange:
        vector = place.value(z)
        return MeanExchange(vector=vector, up=place.up, down=place.down, feedback=self.feedback)
