"""MASHA2: extragradient from a reference point, with contractive compression and error feedback.

Source: Beznosikov, Richtarik, Diskin, Ryabinin, Gasnikov, Distributed Methods with Compressed
Communication for Solving Variational Inequalities, with Theoretical Guarantees, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Self

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.protocols import UpdateCompressor
from shoal.fields.federate.vi.methods.masha1 import refresh_of
from shoal.fields.federate.vi.protocols import MeanExchange, Place, Steps, ViCosts, ViError, ViWork
from shoal.ir import Machine


@part
class Masha2:
    """As MASHA1 with biased compressors such as top_k; both ends send later what they left out.

    There must be no constraint. The steps that its theory allows are smaller than those of MASHA1.

    Args:
        refresh: probability of a refresh in an iteration; None for the ratio of a compressed
            message to a whole one.
        stochastic: evaluate differences on drawn data.
    """

    refresh: Annotated[float, Gt(0), Le(1)] | None = None
    stochastic: bool = False

    @classmethod
    def candidates(cls, work: ViWork, machine: Machine) -> Iterator[Self]:
        """With contractive compressors, without a constraint."""
        if all(contracts(one, work.size) for one in (work.up, work.down)) and not work.constrained:
            yield cls()

    def check(self, work: ViWork) -> None:
        """Both compressors contract, and there is no constraint."""
        for where, one in (("compressor", work.up), ("server_compressor", work.down)):
            if not contracts(one, work.size):
                raise ViError(
                    f"{where}: {one} is no contraction, and masha2 needs one such as top_k or "
                    "power_sgd; masha1 takes this one"
                )
        if work.constrained:
            raise ViError("method = masha2: the problem has a constraint; take masha1")

    def bound(self, work: ViWork) -> float | None:
        """sqrt(p) / (delta delta_server L): the order of the theorem's, without its constant."""
        if work.constants is None:
            return None
        p = refresh_of(self.refresh, work.up, work.size)
        deltas = work.up.omega(work.size) * work.down.omega(work.size)
        mu = work.constants.monotone
        step = math.sqrt(p) / (deltas * max(work.constants.lipschitz))
        return min(step, p / (2 * mu) if mu > 0 else math.inf)

    def costs(self, work: ViWork, step: float) -> ViCosts:
        """A compressed vector in each iteration, a whole one in each refresh."""
        p = refresh_of(self.refresh, work.up, work.size)
        mu = work.constants.monotone if work.constants else 0.0
        whole = 32.0 * work.size
        return ViCosts(
            iterations=work.log_error * max(1 / p, 1 / (step * mu)) if mu else None,
            up_bits=work.up.bits(work.size) + p * whole,
            down_bits=work.down.bits(work.size) + p * whole,
            exchanges=1 + p,
            evaluations=1 + p,
        )

    def steps(self, place: Place) -> Steps:
        """One compressed mean in each iteration; the step is inside what is compressed."""
        p = refresh_of(self.refresh, place.up, place.operator.size)
        z = w = place.operator.start()
        mine = place.value(w)
        all_w = yield place.whole(mine)
        while True:
            half = (1 - p) * z + p * w - place.step * all_w
            sample = place.sample(self.stochastic)
            before = place.value(w, sample) if sample else mine
            change = place.step * (place.value(half, sample) - before)
            g = yield MeanExchange(vector=change, up=place.up, down=place.down, feedback=True)
            z = half - g
            refreshed = place.coin(p)
            place.done(z)
            if refreshed:
                w, mine = z, place.value(z)
                all_w = yield place.whole(mine)


def contracts(compressor: UpdateCompressor, size: int) -> bool:
    """Whether it is contractive; what loses nothing is, too."""
    return compressor.kind == "contractive" or compressor.omega(size) == 1.0
